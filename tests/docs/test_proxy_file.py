"""The proxy's file, as it is shipped, in a real nginx before a server."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests import serving
from tests.chat.live_server import MODEL, ScriptedBackend, live_server
from tests.ports import reserved_port
from tests.waiting import wait_for
from tinkercloud.config import Config

PROXY = serving.ROOT / "docs" / "deploy" / "nginx.conf"
PROGRAMS = ("nginx", "openssl")
LIMIT_BYTES = 1024**2
STOP_S, TOKEN_S = 60.0, 60.0
PROTOBUF = {"content-type": "application/x-protobuf"}

missing = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@contextmanager
def proxy(folder: Path, server_url: str, api_key: str) -> Iterator[httpx.Client]:
    """A client of nginx, over TLS, before a server."""
    certificate = certificate_in(folder)
    port = reserved_port()
    nginx = subprocess.Popen(["nginx", "-c", str(main_file(folder, server_url, port))])
    try:
        await_listener(nginx, port)
        with httpx.Client(
            base_url=f"https://localhost:{port}",
            headers={"X-API-Key": api_key},
            verify=ssl.create_default_context(cafile=str(certificate)),
            trust_env=False,
        ) as client:
            yield client
    finally:
        nginx.terminate()
        nginx.wait(STOP_S)


def certificate_in(folder: Path) -> Path:
    """Of localhost, for a day, where the file expects it."""
    key, certificate = folder / "privkey.pem", folder / "fullchain.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    make += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return certificate


def main_file(folder: Path, server_url: str, port: int) -> Path:
    """The shipped file with this test's ports, certificate and limit, in a configuration of a
    user without rights."""
    text = PROXY.read_text(encoding="utf-8")
    for shipped, here in (
        ("127.0.0.1:8700", server_url.removeprefix("http://")),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/tinkercloud", str(folder)),
        ("client_max_body_size 1g", f"client_max_body_size {LIMIT_BYTES}"),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    (folder / "site.conf").write_text(text, encoding="utf-8")
    parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{part}_temp_path {folder}/{part};\n" for part in parts)
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/site.conf;\n}}\n",
        encoding="utf-8",
    )
    return file


def await_listener(nginx: "subprocess.Popen[bytes]", port: int) -> None:
    def refusal() -> OSError | None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError as error:
            assert nginx.poll() is None, "nginx refuses its files"
            return error
        return None

    wait_for("nginx listens", refusal, lambda error: error is None)


class StepwiseBackend(ScriptedBackend):
    """Draws a token when the client has the one before it."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.next_token = threading.Semaphore(1)

    async def pause(self, place: int) -> None:
        there = await asyncio.to_thread(self.next_token.acquire, timeout=TOKEN_S)
        assert there, f"the client has not got token {place - 1}"


def test_a_sample_streams_through_the_proxy_token_by_token(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "count", "max_tokens": 64, "stream": True}
    with live_server(tmp_path / "server", StepwiseBackend) as server:
        assert isinstance(server.backend, StepwiseBackend)
        server.backend.script = ["one two three"]
        pieces: list[str] = []
        with (
            proxy(tmp_path, server.url, server.keys["ann"]) as client,
            client.stream("POST", "/oai/api/v1/completions", json=body, timeout=TOKEN_S) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                server.backend.next_token.release()
    assert [piece for piece in pieces if piece] == ["one", " two", " three"]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("proxy")
    arguments = ("--backend", "fake", "--max-body-bytes", str(LIMIT_BYTES))
    with (
        serving.start_server(*arguments, data_dir=folder / "data") as server,
        proxy(folder, server.base_url, server.api_key) as client,
    ):
        yield client


def test_proxy_and_server_refuse_the_same_bodies(proxied: httpx.Client) -> None:
    def answer(num_bytes: int) -> httpx.Response:
        path = "/api/v1/forward_backward"
        return proxied.post(path, content=bytes(num_bytes), headers=PROTOBUF)

    assert answer(LIMIT_BYTES).status_code == 400  # the server has read it: these are no message
    assert answer(LIMIT_BYTES + 1).status_code == 413


def test_a_body_without_a_valid_key_is_refused_through_the_proxy(proxied: httpx.Client) -> None:
    headers = {**PROTOBUF, "X-API-Key": "tml-of-nobody"}
    body = bytes(LIMIT_BYTES)
    assert proxied.post("/api/v1/asample", content=body, headers=headers).status_code == 401


def test_what_needs_no_key_and_what_this_machine_alone_may_ask(proxied: httpx.Client) -> None:
    assert proxied.get("/healthz").json() == {"status": "ok"}
    assert proxied.get("/metrics").status_code == 200
    assert proxied.get("/readyz").status_code == 200
