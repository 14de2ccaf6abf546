"""A Hugging Face hub of one account, as far as an upload asks for it: nothing leaves the machine.

The paths are those that huggingface_hub requests (its HfApi); files below its limit for "regular"
ones come in the commit itself, base64.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """files: repository -> path -> content of what was uploaded."""

    url: str = ""
    visibility: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        store = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: Hub

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "ann", "auth": {}})
        elif self.path.startswith("/api/models/"):
            self._answer({"id": "/".join(self.path.split("/")[3:5]), "siblings": []})
        else:
            self._answer({"error": "not here"}, 404)

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.path.split("/")
        if self.path == "/api/repos/create":
            request = json.loads(body)
            name = f"ann/{request['name']}"
            self.store.visibility[name] = request["visibility"]
            self._answer({"url": f"{self.store.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "preupload" in parts:
            paths = [file["path"] for file in json.loads(body)["files"]]
            rows = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
            self._answer({"files": rows})
        elif "commit" in parts:
            self._commit("/".join(parts[3:5]), body)
        else:
            self._answer({"error": "not here"}, 404)

    def _commit(self, repository: str, body: bytes) -> None:
        files = self.store.files.setdefault(repository, {})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = "0" * 40
        url = f"{self.store.url}/{repository}/commit/{oid}"
        self._answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def _answer(self, body: Any, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
