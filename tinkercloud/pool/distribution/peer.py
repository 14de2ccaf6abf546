"""Pieces over HTTP: GET /manifest, /have (and who else is there), /piece/N."""

import contextlib
import hmac
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tinkercloud.errors import ConfigError
from tinkercloud.pool.distribution.piece_store import PieceStore

PORT_HEADER = "X-Peer-Port"
MAX_PEERS = 64


class Peer:
    """Serves a store from a thread of its own. key: what others have to send; None: nothing."""

    def __init__(self, store: PieceStore, host: str, port: int, key: str | None):
        self.store = store
        self._key = key
        self._peers: dict[str, None] = {}
        try:
            self._http = _Http((host, port), self)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def is_allowed(self, authorization: str) -> bool:
        expected = f"Bearer {self._key}".encode()
        return self._key is None or hmac.compare_digest(authorization.encode(), expected)

    def register(self, host: str, port: str | None) -> list[str]:
        """Peers that have asked, with the port that this one serves on, if it does, among them."""
        if (
            port is not None
            and re.fullmatch(r"[1-9]\d{0,4}", port)
            and len(self._peers) < MAX_PEERS
        ):
            self._peers[f"{host}:{port}"] = None
        return list(self._peers)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], peer: Peer):
        self.peer = peer
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = 30.0

    def do_GET(self) -> None:
        peer = self.server.peer
        if not peer.is_allowed(self.headers.get("Authorization", "")):
            self._answer(401, b"a key is wanted: --key-file")
        elif self.path == "/manifest":
            self._answer(200, peer.store.manifest.to_json().encode())
        elif self.path == "/have":
            peers = peer.register(self.client_address[0], self.headers.get(PORT_HEADER))
            have = sorted(peer.store.have)
            self._answer(200, json.dumps({"have": have, "peers": peers}).encode())
        elif (match := re.fullmatch(r"/piece/(\d{1,7})", self.path)) is not None:
            data = peer.store.read(int(match[1]))
            self._answer(404 if data is None else 200, data or b"not here")
        else:
            self._answer(404, b"there is /manifest, /have and /piece/N")

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each piece would say nothing."""
