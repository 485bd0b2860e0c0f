"""The page of a run while it trains: a server for this machine alone, and a page that asks it for what is new."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path as FilePath
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from dessilbi.report.contents import Plain, contents
from dessilbi.report.page import render
from dessilbi.training.run import Run

HOST = "127.0.0.1"
_OURS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
_WATCHED = ("config.toml", "metrics.jsonl", "path.safetensors", "status.json", "table.json", "growth.json")


class Watched:
    """A run folder, read again when one of its files has changed."""

    def __init__(self, folder: FilePath) -> None:
        self.folder = folder
        self._lock = Lock()
        self._seen = ""
        self._contents: Plain = {}
        self.read()

    def read(self) -> tuple[str, Plain]:
        """What it looks like now, and a name for this state."""
        with self._lock:
            try:
                now = self._state()
                if now != self._seen:
                    self._contents = {**contents([self.folder]), "version_of_data": now}
                    self._seen = now
            except (OSError, ValueError):
                # Caught between the files of one epoch; the next question comes within a second.
                if not self._seen:
                    raise
            return self._seen, self._contents

    def _state(self) -> str:
        stats = (self.folder / name for name in _WATCHED)
        parts = [f"{s.st_mtime_ns:x}.{s.st_size:x}" for s in (f.stat() for f in stats if f.is_file())]
        return "-".join([Run.open(self.folder).status, *parts])


def server(folder: FilePath, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page of a run, that only this machine reaches; port 0 takes one that is free.

    It answers two paths, to those who call it by a name of this machine: no other site's page can read it through the
    reader's browser.
    """
    watched = Watched(folder)
    return _Server((HOST, port), _handler(watched))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who closes the window in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(watched: Watched) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if not _OURS.fullmatch(self.headers.get("Host", "")):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this server is for its own machine")
            elif path == "/":
                _, shown = watched.read()
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", render(shown, live=True).encode())
            elif path == "/data.json":
                state, shown = watched.read()
                if parse_qs(query).get("after") == [state]:
                    self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
                else:
                    self._answer(HTTPStatus.OK, "application/json", json.dumps(shown, allow_nan=False).encode())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status != HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the library does not print."""

    return Handler
