"""Spark's monitoring REST API, as far as the coordinator asks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.support.http_server import Server


@contextmanager
def serving_ui(
    running: Mapping[int, list[int]], status: int = 200, *, requests: list[str] | None = None
) -> Iterator[int]:
    """The port. ``running``: jobs with their stages. The paths of all requests are added to ``requests``."""

    def respond(handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if requests is not None:
            requests.append(handler.path)
        found: object = [{"id": "app-1"}]
        if handler.path.endswith("/app-1/jobs?status=running"):
            found = [
                {"jobId": job, "stageIds": stages, "status": "RUNNING"} for job, stages in running.items()
            ]
        return status, {}, json.dumps(found).encode()

    with Server() as server:
        server.respond = respond
        yield int(server.url.rpartition(":")[2])
