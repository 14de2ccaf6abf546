"""`tinkercloud bench pipeline`: what stands for network and other machine, and a small run."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.embedded.tiny import open_store, write_tiny_model
from tinkercloud import cli
from tinkercloud.commands.pipeline import namespace
from tinkercloud.commands.pipeline.delay_relay import DelayRelay
from tinkercloud.commands.pipeline.measure import (
    COLUMNS,
    CONTENDERS,
    PipelineBench,
    Point,
    Scale,
    write_spans,
)
from tinkercloud.commands.pipeline.scripted_drafter import Script, ScriptedDrafter
from tinkercloud.commands.pipeline.worker_process import OVERLAPPED, SERIAL
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import Stream

KNOWN = list(range(2, 402))


def test_a_relay_delays_both_ways_and_keeps_the_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        relay = DelayRelay(server.getsockname()[1], 0.05)
        with socket.create_connection(("127.0.0.1", relay.port)) as client:
            start_s = time.monotonic()
            client.sendall(b"one")
            client.sendall(b"two")
            heard = b""
            while len(heard) < 6:
                heard += client.recv(100)
            assert heard == b"onetwo"
            assert time.monotonic() - start_s >= 0.1
        relay.close()


def test_a_relay_is_as_narrow_as_it_is_told_to_be() -> None:
    data = bytes(200_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = DelayRelay(server.getsockname()[1], 0.0, bytes_per_s=1e6)
        with socket.create_connection(("127.0.0.1", relay.port)) as client:
            start_s = time.monotonic()
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            connection, _ = server.accept()
            with connection:
                heard = b"".join(iter(lambda: connection.recv(65536), b""))
            assert heard == data
            assert time.monotonic() - start_s >= 0.2
        relay.close()


def stream(tokens: list[int]) -> Stream:
    return Stream(0, b"", "v", 0, tokens, 1, SamplingParams(None, 0, 1.0), 0)


def test_a_scripted_drafter_is_right_as_often_as_it_is_told_to_be() -> None:
    drafter = ScriptedDrafter(Script(KNOWN, accepted=0.8, second=0.5, token_s=0.0))
    right = second = 0
    for place in range(1, len(KNOWN)):
        (draft,) = drafter.propose([(stream(KNOWN[:place]), 1)])
        right += draft.tokens[0] == KNOWN[place]
        second += draft.seconds[0] == KNOWN[place]
    assert 0.75 < right / len(KNOWN) < 0.85
    assert 0.3 < second / (len(KNOWN) - right) < 0.7


def test_a_scripted_drafter_takes_its_time_and_stops_when_it_is_told_to() -> None:
    drafter = ScriptedDrafter(Script(KNOWN, 0.8, 0.5, token_s=0.02))
    start_s = time.monotonic()
    drafter.propose([(stream(KNOWN[:2]), 3), (stream(KNOWN[:5]), 2)])
    assert time.monotonic() - start_s >= 0.06
    steps = 0

    def is_stale() -> bool:
        nonlocal steps
        steps += 1
        return steps == 2

    assert drafter.propose_after([(stream(KNOWN[:2]), KNOWN[2:4], 50)], is_stale) is None
    assert steps == 2
    after = drafter.propose_after([(stream(KNOWN[:2]), KNOWN[2:4], 3)], lambda: False)
    assert after == drafter.propose([(stream(KNOWN[:4]), 3)])


def _num_prepared(points: Sequence[Point], kind: str) -> int:
    spans = [span for point in points for span in point.kept[kind].lanes["draft worker"]]
    return sum(span.name == "prepare" for span in spans)


@pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
def test_all_contenders_sample_the_same_and_a_trace_shows_both_sides(tmp_path: Path) -> None:
    base = open_store(write_tiny_model(tmp_path / "tiny")).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    scale = Scale(tokens=24, repeats=1, round_trips_ms=(4,))
    lines: list[str] = []
    bench = PipelineBench(version, lambda _: [1, 2, 3], 1, scale, tmp_path)
    bench.pass_s = 1e-5  # so drafts are prepared before it is known that others are wanted
    points = bench.points(lines.append)
    assert len(lines) == len(points) == 2
    for point in points:
        assert tuple(point.kept) == CONTENDERS
        assert len(point.cells()) == len(COLUMNS)
        assert point.kept[SERIAL].prepared == 0
        assert 0 < point.kept[SERIAL].bytes_a_round < 200
    prepared = {kind: _num_prepared(points, kind) for kind in (SERIAL, OVERLAPPED)}
    assert prepared[OVERLAPPED] > prepared[SERIAL] == 0
    write_spans(points[1], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"target", "draft worker"}
    assert {e["name"] for e in events if e["ph"] == "X"} >= {
        "verify", "wait for drafts", "draft", "prepare",
    }  # fmt: skip


@pytest.mark.skipif(bool(namespace.missing()), reason=f"no namespaces: {namespace.missing()}")
@pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
def test_samples_are_the_same_over_a_lossy_link_to_a_network_namespace(tmp_path: Path) -> None:
    base = open_store(write_tiny_model(tmp_path / "tiny")).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    scale = Scale(tokens=16, repeats=1, round_trips_ms=(), loss=0.05)
    bench = PipelineBench(version, lambda _: [1, 2, 3], 1, scale, tmp_path)
    bench.pass_s = 0.01
    (point,) = bench.points(lambda _: None)
    rounds = [s for s in point.kept[SERIAL].lanes["target"] if s.name == "wait for drafts"]
    round_trip_s = point.round_trip_ms / 1e3
    assert rounds[0].end_s - rounds[0].start_s >= round_trip_s == pytest.approx(0.003)


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data-dir", str(tmp_path), "--model", f"m={tmp_path}"]
    assert cli.main(["bench", "pipeline", "--repeats", "0", *options]) == 2
    assert "--repeats at least 1" in capsys.readouterr().err
    for wrong in ("a", "-1", "1,,2", "nan"):
        with pytest.raises(SystemExit):
            cli.main(["bench", "pipeline", f"--round-trips-ms={wrong}", *options])
    assert "--round-trips-ms" in capsys.readouterr().err
