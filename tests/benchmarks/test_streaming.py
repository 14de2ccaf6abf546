"""The streaming benchmark's figures, and its client of our server."""

import json
from pathlib import Path

import pytest

from benchmarks.lib.limits import Limits
from benchmarks.peers.sampling_bench import Case
from benchmarks.peers.sampling_common import Load, Outcome
from benchmarks.peers.sampling_servers import STREAMED_TOKENS, Completions
from benchmarks.streaming import (
    COLUMNS,
    LLAMA,
    OURS,
    VLLM,
    Figures,
    OpenAiDialect,
    limit_s,
    targets,
)
from tests import serving

EIGHT = Case(64, 8)


def figures(contender: str, first_s: float, gap_s: float, case: Case = EIGHT) -> Figures:
    measured = Figures(contender, "bfloat16", case)
    measured.add(Outcome(1.0, [], first_s=[first_s] * 8, gaps_s=[gap_s] * 100))
    return measured


def test_ours_is_held_against_the_best_peer_of_the_same_case() -> None:
    rows = [
        figures(OURS, 0.1, 0.02),
        figures(LLAMA, 0.2, 0.01),
        figures(VLLM, 0.15, 0.05),
        figures(LLAMA, 0.001, 0.001, Case(64, 1)),
    ]
    assert [(each.value, each.met) for each in targets(rows)] == [(1.5, True), (0.5, False)]
    assert targets(rows[:1]) == []


def test_the_limit_is_the_longer_of_reading_and_multiplying() -> None:
    limits = Limits(read_gb_s=10.0, gflop_s={"float32": 10.0, "bfloat16": 100.0})
    alone = figures(OURS, 0.1, 0.04, Case(64, 1))
    assert limit_s(limits, 10**8, alone) == pytest.approx(0.02)
    assert limit_s(limits, 10**8, figures(OURS, 0.1, 0.04, Case(64, 32))) == pytest.approx(0.064)
    cells = dict(zip(COLUMNS, alone.cells(0.02), strict=True))
    assert (cells["streams"], cells["failed"], cells["of the limit"]) == (8, 0, 0.5)
    assert (cells["first p50 ms"], cells["next p95 ms"]) == (100.0, 40.0)


async def test_our_streams_have_a_time_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fake backend, which serves a folder with a tokenizer under the benchmark's name;
    greedy, since a token that is drawn may end the stream."""
    folder = serving_folder(tmp_path / "model")
    with serving.start_server(
        *("--backend", "fake", "--model", f"smollm2={folder}"), data_dir=tmp_path / "data"
    ) as server:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        client = Completions(int(server.base_url.rpartition(":")[2]), OpenAiDialect(), headers)
        outcome = await client.latency(Load(((1, 2, 3), (4, 5)), 64, greedy=True))
        whole = await client.generate(Load(((1, 2, 3),), 4, greedy=True))
        await client.close()
    assert len(outcome.first_s) == 2
    assert len(outcome.gaps_s) == 2 * (STREAMED_TOKENS - 1)
    assert [len(sample) for sample in whole.samples] == [4]


def serving_folder(folder: Path) -> Path:
    from tests.embedded.tiny import write_tiny_model

    write_tiny_model(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 260
    return folder
