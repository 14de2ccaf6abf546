"""Half-open requests are closed in time, by a real server over real sockets."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serving import Server, start_server

HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nhost: a\r\n"
SETTINGS = {"head-timeout-s": "1.5", "body-timeout-s": "1.5", "max-connections": "400"}
LIMIT_S = 60.0  # in which the server does what it does after the times above


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    data_dir = tmp_path_factory.mktemp("connections") / "data"
    with start_server("--backend", "fake", *flags, data_dir=data_dir) as running:
        yield running


def connected(server: Server, *sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
    for piece in sent:
        client.sendall(piece)
    return client


def closed_after(client: socket.socket) -> bytes:
    """What the server answered before it closed the connection. It may do that before it has read
    what was sent: then the connection is reset."""
    answer = b""
    with client:
        try:
            while piece := client.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    return answer


def authenticated_head(server: Server, length: int) -> bytes:
    fields = f"x-api-key: {server.api_key}\r\ncontent-type: application/json\r\n"
    return HEAD + fields.encode() + f"content-length: {length}\r\n\r\n".encode()


@contextmanager
def an_honest_client(server: Server) -> Iterator[list[float]]:
    """Polls all the while; the seconds that each took so far. Fails where one fails."""
    took_s: list[float] = []
    errors: list[Exception] = []
    ended = threading.Event()

    def poll() -> None:
        with server.http(timeout_s=LIMIT_S) as http:
            while not ended.is_set():
                start = time.monotonic()
                try:
                    http.post("/api/v1/create_session", json={"tags": []}).raise_for_status()
                except httpx.HTTPError as error:
                    errors.append(error)
                took_s.append(time.monotonic() - start)
                time.sleep(0.02)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield took_s
    finally:
        ended.set()
        thread.join()
    assert not errors


def test_hundreds_of_half_open_requests_are_closed_while_an_honest_client_goes_on(
    server: Server,
) -> None:
    with an_honest_client(server) as took_s:
        half = [connected(server) for _ in range(100)]
        half += [connected(server, HEAD) for _ in range(100)]
        half += [connected(server, authenticated_head(server, 1000), b"{") for _ in range(100)]
        num_before = len(took_s)
        answers = [closed_after(client) for client in half]
        num_meanwhile = len(took_s) - num_before
    assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 408"}
    assert num_meanwhile > 1, "one that took until they were closed"


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_byte_now_and_then_does_not_keep_a_request_open(server: Server, part: str) -> None:
    sent = HEAD if part == "head" else authenticated_head(server, 1000)
    client = connected(server, sent)
    start = time.monotonic()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while time.monotonic() - start < LIMIT_S:
            client.sendall(b"x")
            time.sleep(0.2)
    client.close()


def test_a_body_that_comes_at_a_fair_rate_is_taken_beyond_the_time(server: Server) -> None:
    body = json.dumps({"tags": ["x" * 100_000]}).encode()
    client = connected(server, authenticated_head(server, len(body)))
    for start in range(0, len(body), len(body) // 12 + 1):
        client.sendall(body[start : start + len(body) // 12 + 1])
        time.sleep(0.25)
    assert client.recv(65536).startswith(b"HTTP/1.1 200")
    client.close()


def test_kept_connections_and_held_polls_outlive_the_times(server: Server) -> None:
    with server.http() as http:
        session_id = http.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
        time.sleep(4)
        beat = {"session_id": session_id, "type": "session_heartbeat"}
        assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 200
        target = {"sampling_session_id": f"{session_id}:sample:0", "cloned_sampler_id": 0}
        made = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "fake/tiny"}
        http.post("/api/v1/create_sampling_session", json=made).raise_for_status()
        start = time.monotonic()
        poll = {"target": {"type": "sampling_session", **target}, "prev_cursor": 0, "timeout": 4.0}
        assert http.post("/api/v1/retrieve_futures", json=poll).json()["completions"] == []
        assert time.monotonic() - start > 3.9


def test_half_open_connections_make_room_for_new_ones(server: Server) -> None:
    half = [connected(server, HEAD) for _ in range(420)]
    with server.http() as http:
        assert http.get("/api/v1/healthz").status_code == 200
    assert closed_after(half[0]) == b""
    for client in half:
        client.close()


def test_a_body_without_a_key_is_not_read(server: Server) -> None:
    client = connected(server, HEAD + b"content-length: 1000000000\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 401")
    sent = 0
    with pytest.raises(OSError):
        while sent < 200_000_000:
            sent += client.send(bytes(1_000_000))
    assert sent < 100_000_000
    client.close()


def test_a_client_whose_key_is_refused_reads_why_though_it_sends_five_megabytes(
    server: Server,
) -> None:
    with server.http(authenticated=False) as http:
        for _ in range(2):
            answer = http.post("/api/v1/forward_backward", content=bytes(5_000_000))
            assert answer.status_code == 401
            assert "API key" in answer.json()["detail"]


def test_the_last_connection_is_told_when_all_others_are_busy(tmp_path: Path) -> None:
    flags = ("--backend", "fake", "--max-connections", "2")
    with start_server(*flags, data_dir=tmp_path / "data") as server:
        body = authenticated_head(server, 1000)[:-2] + b"expect: 100-continue\r\n\r\n"
        busy = [connected(server, body) for _ in range(2)]
        for client in busy:  # their heads are read, and their requests under way
            assert client.recv(100).startswith(b"HTTP/1.1 100")
        answer = closed_after(connected(server))
        assert answer.startswith(b"HTTP/1.1 503")
        head, _, text = answer.partition(b"\r\n\r\n")
        assert f"content-length: {len(text)}".encode() in head
        for client in busy:
            client.close()
