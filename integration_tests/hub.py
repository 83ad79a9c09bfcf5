"""A local hub that serves one repository and records its requests."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class FakeHub:
    """The hub's endpoints for downloads, for the one repository `some/model`."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT, "refs/pr/1")
    refusal: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer."""
    cut_after: int | None = None
    """The first answer with a file of at least this length is cut off there."""
    chunk_delay_s: float = 0
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of every request."""
    tokens: set[str | None] = field(default_factory=set)
    endpoint: str = ""

    def etag(self, name: str) -> str:
        data = self.files[name]
        is_large = name.endswith((".safetensors", ".bin"))
        return (hashlib.sha256 if is_large else hashlib.sha1)(data).hexdigest()

    def listing(self) -> bytes:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": self.etag(name)}
            for name, data in self.files.items()
        ]
        return json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()

    def tree(self) -> bytes:
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": self.etag(name)}
            for name, data in self.files.items()
        ]
        return json.dumps(files).encode()

    def asked_for(self, name: str) -> list[str | None]:
        """The Range of each GET of a file."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(name)]


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers["Range"]))
        hub.tokens.add(self.headers["authorization"])
        if hub.refusal:
            self.fail(*hub.refusal)
        elif path.startswith("/api/models/some/model/revision/"):
            if path.removeprefix("/api/models/some/model/revision/") in hub.revisions:
                self.send_body(hub.listing(), "listing")
            else:
                self.fail(404, "RevisionNotFound")
        elif path == f"/api/models/some/model/tree/{COMMIT}":
            self.send_body(hub.tree(), "tree")
        elif path.startswith(f"/some/model/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/some/model/resolve/{COMMIT}/")
            self.send_body(hub.files[name], hub.etag(name))
        else:
            self.fail(404, "RepoNotFound")

    def send_body(self, data: bytes, etag: str) -> None:
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(data)
        if self.hub.cut_after is not None and end >= self.hub.cut_after:
            end, self.hub.cut_after = self.hub.cut_after, None
        for position in range(start, end, 1 << 16):
            self.wfile.write(data[position : min(position + (1 << 16), end)])
            time.sleep(self.hub.chunk_delay_s)
        self.close_connection = end < len(data)


@contextmanager
def serving(hub: FakeHub, host: str = "127.0.0.1") -> Iterator[FakeHub]:
    """Serves on a free port of that address, see `hub.endpoint`, until the block ends."""
    handler = type("Handler", (HubHandler,), {"hub": hub})

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignores clients that disconnect, as in some tests."""

    with Server((host, 0), handler) as server:
        hub.endpoint = f"http://{host}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
