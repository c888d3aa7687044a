"""Spark's monitoring REST API, as far as the coordinator asks it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def serving_ui(
    running: Mapping[int, list[int]],
    status: int = 200,
    *,
    executions: Mapping[int, str] | None = None,
    asked: list[int] | None = None,
    requests: list[str] | None = None,
) -> Iterator[int]:
    """The port. ``running``: jobs with their stages. ``executions``: the status of each SQL execution; those
    that were asked for are added to ``asked``, and the paths of all requests to ``requests``."""

    def found(path: str) -> object:
        if path.endswith("/app-1/jobs?status=running"):
            return [
                {"jobId": job, "stageIds": stages, "status": "RUNNING"} for job, stages in running.items()
            ]
        if "/app-1/sql/" not in path:
            return [{"id": "app-1"}]
        execution = int(path.partition("/sql/")[2].partition("?")[0])
        if asked is not None:
            asked.append(execution)
        known = (executions or {}).get(execution)
        return None if known is None else {"id": execution, "status": known}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if requests is not None:
                requests.append(self.path)
            answer = found(self.path)
            body = json.dumps(answer).encode()
            self.send_response(404 if answer is None else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
