"""`pool init` and workers that it finds, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.pool.pools import fake_programs
from tests.ports import reserved_ports
from tests.serving import command
from tests.waiting import wait_for_line
from tinkercloud.commands.pools.setup import write_pool
from tinkercloud.errors import ConfigError
from tinkercloud.pool.pool_file import load_pool
from tinkercloud.pool.searching import FoundWorker, search

KEY = "a-worker-s-key"
HERE = "127.0.0.0/30"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one that wants a key."""
    folder = tmp_path_factory.mktemp("worker")
    port, log, key_file = reserved_ports(3), folder / "worker.log", folder / "key"
    key_file.write_text(KEY)
    words = ["--listen", f"127.0.0.1:{port}", "--rpc-server", fake_programs(folder)["rpc"]]
    words += ["--device", "CPU", "--device", "CUDA0", "--key-file", str(key_file)]
    with command("pool", "worker", *words, "--data-dir", str(folder / "data"), log=log) as process:
        wait_for_line("ready: ", log, process)
        yield port


@contextmanager
def another_server(answer: bytes) -> Iterator[tuple[int, list[str]]]:
    """Its port, and the keys that it was sent."""
    keys = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def arguments(folder: Path, **changes: object) -> dict[str, object]:
    names = ("model", "worker", "search", "key_file", "memory", "port")
    given: dict[str, object] = dict.fromkeys(names)
    given |= {"file": folder / "pool.yaml", "force": False, "unencrypted_network": False}
    return given | {"search_port": 50050, "model": ["m=m.gguf"]} | changes


def test_a_worker_is_found_and_says_its_devices_to_whoever_has_its_key(worker: int) -> None:
    assert search(HERE, worker) == [FoundWorker("127.0.0.1", worker, key_wanted=True)]
    assert search(HERE, worker, "another") == [FoundWorker("127.0.0.1", worker, key_wanted=True)]
    found = search(HERE, worker, KEY)
    assert found == [FoundWorker("127.0.0.1", worker, ("CPU", "CUDA0"))]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"hello", b"[]", b"{}", b'{"devices": []}', b'{"devices": [{"device": "--flag"}]}'),
        b'{"devices": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_other_servers_are_no_workers_and_get_no_key(answer: bytes) -> None:
    with another_server(answer) as (port, keys):
        assert search(HERE, port, KEY) == []
    assert keys == [""]


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("home", "is no network"),
        ("8.8.8.0/24", "not a local network"),
        ("10.0.0.0/8", "a /20"),
        ("fd00::/64", "a /20"),
    ],
)
def test_other_networks_are_not_searched(network: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        search(network, 50050)


def test_init_takes_what_it_finds(worker: int, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    given = arguments(tmp_path, search=[HERE], search_port=worker, key_file=key_file)
    lines = list(write_pool(given))
    assert lines[:2] == [f"{HERE}: 1 workers", f"  127.0.0.1:{worker} lends CPU, CUDA0"]
    (found,) = load_pool(tmp_path / "pool.yaml").workers
    assert (found.start, found.host, found.port) == ("by_hand", "127.0.0.1", worker)
    assert [gpu.device for gpu in found.gpus] == ["CPU", "CUDA0"] and found.key_file == key_file


def test_init_without_the_key_says_which_worker_wants_one(worker: int, tmp_path: Path) -> None:
    lines = list(write_pool(arguments(tmp_path, search=[HERE], search_port=worker)))
    assert f"127.0.0.1:{worker} wants another key" in lines[1]
    assert load_pool(tmp_path / "pool.yaml").workers == ()


def test_init_at_a_terminal_asks_what_to_take(worker: int, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    answers = iter(["m=m.gguf", "", HERE, "", "n", "local", ""])
    given = arguments(tmp_path, model=None, search_port=worker, key_file=key_file)
    asked = list[str]()

    def ask(question: str) -> str:
        asked.append(question)
        return next(answers)

    list(write_pool(given, ask))
    assert f"127.0.0.1:{worker} lends CPU, CUDA0: take it? y/n" in asked
    (taken,) = load_pool(tmp_path / "pool.yaml").workers
    assert taken.start == "local"
