"""A server that takes nothing but the forms of the hosted service: tokens in place of keys, zstd
bodies, one poll for all samples of a session; and that says 402 and rejects tokens as it likes."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import zstandard

from tests.mock_api import MockApi
from tinkercloud.wire import codec

API_KEY = "tml-hosted"
FLAGS = {
    "pjwt_auth_enabled": True,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "billing_exception_max_pause_duration_sec": 600,
}


def token(number: int, lifetime_s: float = 3600.0) -> str:
    now = time.time()
    claims = {"sub": "tml:user:ann", "org_id": "org", "iat": now, "exp": now + lifetime_s}
    claims |= {"number": number, "email": "ann@example.org"}
    parts = ({"alg": "none"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*encoded, b"signature"]).decode()


@dataclass
class HostedApi(MockApi):
    """broken: what a client did that the hosted service does not take. exchanges: how often a key
    was exchanged, and for which credential. ended: samples in the order of their results."""

    config: dict[str, Any] = field(default_factory=lambda: dict(FLAGS))
    credential: str = API_KEY
    broken: list[str] = field(default_factory=list)
    exchanges: list[str] = field(default_factory=list)
    valid: str = ""
    ended: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/")
        key = request.headers.get("x-api-key", "")
        is_poll = path.startswith("retrieve_future")
        if request.method == "POST" and "x-idempotency-key" not in request.headers and not is_poll:
            self.broken.append(f"{path} without an idempotency key")
        if path == "auth/token":
            return self._exchange(key)
        if path != "client/config" and key != self.valid:
            headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            return httpx.Response(401, json={"detail": "no such token"}, headers=headers)
        if path == "forward_backward" and request.headers.get("content-encoding") != "zstd":
            self.broken.append("forward_backward without zstd")
        if path == "retrieve_future":
            self._check_poll(request)
        answer = super().answer(request)
        if path == "asample" and answer.status_code == 200:
            self.ended.append(answer.json()["request_id"])
        return answer

    def reject_token(self) -> None:
        """As the service does when keys change: before the token's own time."""
        self.valid = "another"

    def _exchange(self, key: str) -> httpx.Response:
        self.exchanges.append(key)
        if key != self.credential:
            return httpx.Response(401, json={"detail": "no such credential"})
        self.valid = token(len(self.exchanges))
        return httpx.Response(200, json={"jwt": self.valid})

    def _check_poll(self, request: httpx.Request) -> None:
        request_id = json.loads(request.content)["request_id"]
        if "x-tinker-request-type" not in request.headers:
            self.broken.append(f"a poll of {request_id} without its type")
        if request_id.startswith("sample") and request_id not in self.told:
            self.broken.append(f"a poll of {request_id}, of which retrieve_futures has not told")

    def _body(self, path: str, content: bytes) -> Any:
        if path == "forward_backward":
            return codec.decode_forward_backward_request(
                zstandard.ZstdDecompressor().decompressobj().decompress(content)
            )
        return super()._body(path, content)

    def on_client_dynamic_config(self, _: Any) -> httpx.Response:
        return httpx.Response(200, json={})

    def on_join_sampling_session(self, _: Any) -> httpx.Response:
        return httpx.Response(200, json={"client_counter": 3, "type": "join_sampling_session"})

    def on_retrieve_futures(self, body: Any) -> httpx.Response:
        self.fetched |= set(body["retrieved_request_ids"])
        new = self.ended[body["prev_cursor"] :]
        self.told |= set(new)
        completions = [
            {"state": "finished", "request_id": each, "response_payload_uncompressed_size": 100}
            for each in new
        ]
        return httpx.Response(200, json={"completions": completions, "cursor": len(self.ended)})


@contextmanager
def served(api: MockApi) -> Iterator[str]:
    """The address of a server of these answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = httpx.Request(
                self.command,
                f"http://server{self.path}",
                headers=dict(self.headers),
                content=content,
            )
            answer = api.answer(request)
            self.send_response(answer.status_code)
            for name in ("content-type", "www-authenticate"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
