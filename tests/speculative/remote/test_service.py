"""Drafts over gRPC: keys, certificates, ends, and coming back."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from operator import not_
from pathlib import Path

import grpc
import pytest

from tests.ports import reserved_port
from tests.speculative.remote.test_remote_drafter import begun, tokens_of
from tests.speculative.remote.test_worker import Counting
from tests.speculative.remote.workers import TARGET, worker_of
from tests.waiting import wait_for
from tinkercloud.addresses import Address, parse_address, parse_addresses, read_key
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.remote import link as link_module
from tinkercloud.speculative.remote.connection import ClientSecurity, ServerSecurity
from tinkercloud.speculative.remote.link import GrpcLink
from tinkercloud.speculative.remote.methods import DRAFT
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.service import WorkerServer
from tinkercloud.speculative.remote.worker import DraftWorker

HERE = Address("127.0.0.1", 0)
KEY = "a-key-of-a-test"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FIRST_WAIT_S", 0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., WorkerServer[DraftWorker]]]:
    servers: list[WorkerServer[DraftWorker]] = []

    def start(
        worker: DraftWorker, address: Address = HERE, security: ServerSecurity | None = None
    ) -> WorkerServer[DraftWorker]:
        server = WorkerServer.start(worker, DRAFT, address, security or ServerSecurity())
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteDrafter]]:
    remotes: list[RemoteDrafter] = []

    def connect(*ports: int, security: ClientSecurity | None = None) -> RemoteDrafter:
        security = security or ClientSecurity()
        links = [GrpcLink(Address("127.0.0.1", port), security, TARGET) for port in ports]
        remotes.append(RemoteDrafter(links, LIMIT_S, TARGET.vocab_size))
        return remotes[-1]

    yield connect
    for remote in remotes:
        remote.close()


Start = Callable[..., WorkerServer[DraftWorker]]
Connect = Callable[..., RemoteDrafter]


def test_drafts_come_over_grpc_and_outcomes_without_asking(start: Start, connect: Connect) -> None:
    worker = worker_of(Counting)
    remote = connect(start(worker).port)
    wait_for("it is connected", lambda: remote.is_connected)
    one = begun(remote, [1, 2])
    assert tokens_of(remote, one) == (3, 4, 5)
    wait_for(
        "the answer has come, and what is prepared",
        lambda: len(remote._branches[one.id]),
        lambda number: number > 1,
    )
    one.tokens.extend([3, 4, 5, 6])
    assert tokens_of(remote, one) == (7, 8, 9)
    assert remote.counts["prepared"] == 1
    remote.close()
    wait_for(
        "nothing is left of it",
        worker.stats,
        lambda s: s["samples"] == s["connections"] == 0,
    )


def test_a_worker_that_is_started_later_or_again_is_found(start: Start, connect: Connect) -> None:
    port = reserved_port()  # nobody else is given it while the worker is away
    first = start(worker_of(Counting), Address("127.0.0.1", port))
    remote = connect(port)
    wait_for("it is connected", lambda: remote.is_connected)
    one = begun(remote, [1, 2])
    assert tokens_of(remote, one) == (3, 4, 5)
    first.stop()
    wait_for("it is not connected", lambda: remote.is_connected, not_)
    one.tokens.extend([9])
    began = time.monotonic()
    assert tokens_of(remote, one) == ()
    assert time.monotonic() - began < LIMIT_S / 2, "one that is known to be away is not waited for"
    start(worker_of(Counting), Address("127.0.0.1", port))
    wait_for("it is connected", lambda: remote.is_connected)
    assert tokens_of(remote, one) == (10, 11, 12)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return path


def test_a_key_is_asked_for_and_is_enough(
    start: Start, connect: Connect, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = start(worker_of(Counting), security=ServerSecurity(KEY)).port
    right = connect(port, security=ClientSecurity(key_file))
    wait_for("it is connected", lambda: right.is_connected)
    without = connect(port)
    wait_for("it is refused", lambda: caplog.text, lambda text: "wants its key" in text)
    wrong = key_file.with_name("wrong")
    wrong.write_text("another")
    other = connect(port, security=ClientSecurity(wrong))
    wait_for(
        "it is refused again",
        lambda: caplog.text,
        lambda text: text.count("wants its key") >= 2,
    )
    assert not without.is_connected
    assert not other.is_connected
    assert KEY not in caplog.text


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 for a day, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="not installed: openssl")
def test_tls_with_a_certificate_that_is_trusted(
    start: Start, connect: Connect, tmp_path: Path, key_file: Path
) -> None:
    pair, (stranger, _) = self_signed(tmp_path, "worker"), self_signed(tmp_path, "stranger")
    port = start(worker_of(Counting), security=ServerSecurity(KEY, *pair)).port
    remote = connect(port, security=ClientSecurity(key_file, pair[0]))
    wait_for("it is connected", lambda: remote.is_connected)
    assert tokens_of(remote, begun(remote, [1, 2])) == (3, 4, 5)
    other = connect(port, security=ClientSecurity(key_file, stranger))
    time.sleep(0.5)
    assert not other.is_connected


def test_bytes_that_are_no_messages_end_that_call_alone(start: Start, connect: Connect) -> None:
    worker = worker_of(Counting)
    port = start(worker).port
    remote = connect(port)
    wait_for("it is connected", lambda: remote.is_connected)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(DRAFT.path)(iter([b"\xff\xff\xff"]))
        with pytest.raises(grpc.RpcError):
            list(call)
    assert tokens_of(remote, begun(remote, [1, 2])) == (3, 4, 5)


def test_a_network_address_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="without a key"):
        WorkerServer.start(worker_of(Counting), DRAFT, Address("0.0.0.0", 0), ServerSecurity())
    with pytest.raises(ConfigError, match="go together"):
        ServerSecurity(KEY, Path("cert.pem")).check(HERE)


def test_a_port_that_is_taken_is_said(start: Start) -> None:
    port = start(worker_of(Counting)).port
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        WorkerServer.start(worker_of(Counting), DRAFT, Address("127.0.0.1", port), ServerSecurity())


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:99999", "a:1,"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_addresses(text)


def test_addresses() -> None:
    assert parse_addresses("a:1, [::1]:2") == (Address("a", 1), Address("::1", 2))
    assert [str(each) for each in parse_addresses("a:1,[::1]:2")] == ["a:1", "[::1]:2"]
    loops = ("localhost:1", "127.0.0.9:1", "[::1]:1", "10.0.0.1:1", "example.org:1")
    assert [parse_address(each).is_loopback for each in loops] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("content", ["", "\n", "a\nb", "ключ"])
def test_a_file_without_a_key_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_key(tmp_path / "absent")
