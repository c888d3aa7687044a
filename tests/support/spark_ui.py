"""Spark's monitoring REST API, as far as the coordinator asks it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def serving_ui(
    running: Mapping[int, list[int]], status: int = 200, *, requests: list[str] | None = None
) -> Iterator[int]:
    """The port. ``running``: jobs with their stages. The paths of all requests are added to ``requests``."""

    def found(path: str) -> object:
        if path.endswith("/app-1/jobs?status=running"):
            return [
                {"jobId": job, "stageIds": stages, "status": "RUNNING"} for job, stages in running.items()
            ]
        return [{"id": "app-1"}]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if requests is not None:
                requests.append(self.path)
            body = json.dumps(found(self.path)).encode()
            self.send_response(status)
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
