"""Files from peer to peer over loopback, with peers that die, lie, or begin in the middle."""

import json
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzzing
from tests.serving import command
from tests.waiting import wait_for_line
from tinkercloud.cli import main
from tinkercloud.errors import ConfigError
from tinkercloud.pool.distribution import download as downloading
from tinkercloud.pool.distribution.download import Download, fetch_manifest, rarest_piece
from tinkercloud.pool.distribution.manifest import Manifest, make_manifest, parse_manifest
from tinkercloud.pool.distribution.peer import Peer
from tinkercloud.pool.distribution.piece_store import PieceStore

LIMIT_S = 60.0
PIECE = 4096
NUM_PIECES = 41


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(random.Random(1).randbytes(PIECE * (NUM_PIECES - 1) + 100))
    return path


@contextmanager
def peer_of(store: PieceStore, key: str | None = None) -> Iterator[Peer]:
    peer = Peer(store, "127.0.0.1", 0, key)
    try:
        yield peer
    finally:
        peer.close()
        store.close()


def store_with(folder: Path, original: Path, manifest: Manifest, pieces: set[int]) -> PieceStore:
    store = PieceStore(folder / manifest.name, manifest)
    data = original.read_bytes()
    for index in pieces:
        offset, length = manifest.span(index)
        assert store.write(index, data[offset : offset + length])
    return store


@fuzzing(100, repeats=True)
@given(st.binary(min_size=1, max_size=200), st.integers(1, 64))
def test_a_manifest_is_read_back_and_its_pieces_make_up_the_file(
    data: bytes, piece_bytes: int
) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        manifest = make_manifest(Path(file.name), piece_bytes)
    assert parse_manifest(manifest.to_json()) == manifest
    spans = [manifest.span(index) for index in range(manifest.num_pieces)]
    pieces = [data[offset : offset + length] for offset, length in spans]
    assert b"".join(pieces) == data
    assert all(manifest.holds(index, piece) for index, piece in enumerate(pieces))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../m.gguf"},
        {"name": ".hidden/x"},
        {"num_bytes": -1},
        {"piece_bytes": 0},
        {"piece_bytes": 2**40},
        {"num_bytes": PIECE * 100},
        {"pieces": ["short"]},
    ],
)
def test_a_manifest_that_could_do_harm_is_refused(
    change: dict[str, object], original: Path
) -> None:
    values = json.loads(make_manifest(original, PIECE).to_json()) | change
    with pytest.raises(ConfigError):
        parse_manifest(json.dumps(values))


@fuzzing(100, repeats=True)
@given(st.sets(st.integers(0, 9)), st.dictionaries(st.integers(0, 9), st.integers(0, 3)))
def test_the_rarest_piece_that_somebody_holds_is_next(
    missing: set[int], holders: dict[int, int]
) -> None:
    piece = rarest_piece(missing, holders, random.Random(0))
    held = {n: holders[n] for n in missing if holders.get(n)}
    assert (piece is None) == (not held)
    if piece is not None:
        assert held[piece] == min(held.values())


def test_a_file_is_fetched_whole_and_again_at_once(original: Path, tmp_path: Path) -> None:
    manifest = make_manifest(original, PIECE)
    with peer_of(PieceStore(original, manifest), "k") as seeder:
        address = f"127.0.0.1:{seeder.port}"
        with pytest.raises(ConfigError, match="no peer answers"):
            fetch_manifest([address], None, None)
        with pytest.raises(ConfigError, match="not 00"):
            fetch_manifest([address], "k", "00")
        fetched = fetch_manifest(["127.0.0.1:1", address], "k", manifest.digest)
        store = PieceStore(tmp_path / fetched.name, fetched)
        Download(store, (address,), "k").run()
        store.close()
    assert (tmp_path / "m.gguf").read_bytes() == original.read_bytes()
    assert not (tmp_path / "m.gguf.part").exists()
    again = PieceStore(tmp_path / "m.gguf", manifest)
    assert again.is_whole
    again.close()


def test_another_file_of_that_name_is_not_overwritten(original: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(ConfigError, match="move it away"):
        PieceStore(tmp_path / "m.gguf", make_manifest(original, PIECE))
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_what_was_fetched_before_a_cut_is_kept_and_damage_in_it_is_found(
    original: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(original, PIECE)
    store_with(tmp_path, original, manifest, set(range(20))).close()
    part = tmp_path / "m.gguf.part"
    data = bytearray(part.read_bytes())
    data[PIECE * 3] ^= 1
    part.write_bytes(data)
    store = PieceStore(tmp_path / "m.gguf", manifest)
    assert store.have == set(range(20)) - {3}
    assert store.read(3) is None
    assert not store.write(3, b"x" * PIECE)
    store.close()


def test_a_peer_that_lies_is_left_and_the_file_is_right(original: Path, tmp_path: Path) -> None:
    manifest = make_manifest(original, PIECE)

    class Liar(PieceStore):
        def read(self, index: int) -> bytes | None:
            return b"\0" * PIECE

    said: list[str] = []
    liar = Liar(original, manifest)
    with peer_of(liar) as bad, peer_of(PieceStore(original, manifest)) as good:
        store = PieceStore(tmp_path / "m.gguf", manifest)
        addresses = (f"127.0.0.1:{bad.port}", f"127.0.0.1:{good.port}")
        Download(store, addresses, report=said.append).run()
        store.close()
    assert (tmp_path / "m.gguf").read_bytes() == original.read_bytes()
    damaged = [line for line in said if "damaged" in line]
    assert 1 <= len(damaged) <= downloading.MAX_DAMAGED + downloading.CONNECTIONS


def test_peers_hear_of_each_other_and_fetch_what_the_seeder_has_not(
    original: Path, tmp_path: Path
) -> None:
    """Of three peers on three ports only the first is named to the second, which asks it and so
    becomes known to the third."""
    manifest = make_manifest(original, PIECE)
    seeder = store_with(tmp_path / "s", original, manifest, set(range(10)))
    first = store_with(tmp_path / "a", original, manifest, set(range(10, 30)))
    second = store_with(tmp_path / "b", original, manifest, set(range(30, NUM_PIECES)))
    with peer_of(seeder) as named, peer_of(first) as one, peer_of(second) as other:
        address = (f"127.0.0.1:{named.port}",)
        threads = [
            threading.Thread(target=Download(store, address, own_port=peer.port).run)
            for store, peer in ((first, one), (second, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert first.is_whole and second.is_whole


def test_pieces_that_nobody_has_end_in_a_sentence(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "ALONE_S", 1.0)
    manifest = make_manifest(original, PIECE)
    seeder = store_with(tmp_path / "s", original, manifest, {0, 1})
    store = PieceStore(tmp_path / "m.gguf", manifest)
    with peer_of(seeder) as peer, pytest.raises(ConfigError, match="39 pieces"):
        Download(store, (f"127.0.0.1:{peer.port}",)).run()
    assert store.have == {0, 1}
    store.close()


def test_two_peers_end_with_the_whole_file_though_its_only_seeder_is_killed(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Three processes on three ports. Each fetcher begins with half of the pieces, and the seeder
    is killed as soon as both know the manifest."""
    manifest = make_manifest(smollm2_gguf)
    halves = [set(range(0, manifest.num_pieces, 2)), set(range(1, manifest.num_pieces, 2))]
    for name, half in zip("ab", halves, strict=True):
        store_with(tmp_path / name, smollm2_gguf, manifest, half).close()
    logs = {name: tmp_path / f"{name}.log" for name in ("seed", "a", "b")}
    with command("pool", "seed", str(smollm2_gguf), log=logs["seed"]) as seeder:
        seeds = wait_for_line(r"ready: (127.0.0.1:\d+)", logs["seed"], seeder)[1]
        digest = wait_for_line("digest ([0-9a-f]+)", logs["seed"], seeder)[1]
        common = ("--digest", digest, "--stay")
        first = ("pool", "fetch", seeds, "--to", str(tmp_path / "a"), *common)
        with command(*first, log=logs["a"]) as one:
            peer = wait_for_line(r"serving them at (127.0.0.1:\d+)", logs["a"], one)[1]
            second = ("pool", "fetch", seeds, peer, "--to", str(tmp_path / "b"), *common)
            with command(*second, log=logs["b"]) as other:
                wait_for_line("serving them", logs["b"], other)
                seeder.kill()
                for name, process in (("a", one), ("b", other)):
                    wait_for_line("whole: ", logs[name], process)
                    fetched = (tmp_path / name / smollm2_gguf.name).read_bytes()
                    assert fetched == smollm2_gguf.read_bytes()
                    assert process.poll() is None
                for process in (one, other):
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("seed", "/no/such/file"), "there is no file"),
        (("seed", "/no/such/file", "--listen", "0.0.0.0:0"), "needs a key"),
        (("fetch", "127.0.0.1:1"), "start `tinkercloud pool seed`"),
    ],
)
def test_what_cannot_work_is_said(
    arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", *arguments]) == 2
    assert what in capsys.readouterr().err
