"""What the concurrency benchmark makes of its loads."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.concurrency import (
    DOCUMENTS,
    ENGINE,
    PLAIN,
    RECORDS,
    SERVER,
    WORKERS,
    Bench,
    LoadResult,
    Volume,
    draw,
    of,
    shown_of,
    targets,
)
from benchmarks.peers.sampling_bench import Prompts

SIZE = Volume((1, 3), 4, 5, (0.5,), 0.05)
RATES = {SERVER: 90.0, PLAIN: 100.0, ENGINE: 120.0, WORKERS: 60.0}


class Echo:
    """Answers from the prompt and the seed; one of its answers differs."""

    def __init__(self, wrong: int | None = None):
        self.asked = 0
        self._wrong = wrong

    async def sample(self, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
        self.asked += 1
        await asyncio.sleep(0.001)
        first = -1 if seed == self._wrong else prompt[0]
        return [first, *range(seed, seed + max_tokens - 1)]


class AnyText:
    def fault(self, prompts: object, samples: object) -> str | None:
        return None


def run(wrong: int | None = None) -> tuple[list[LoadResult], dict[str, Echo]]:
    clients = {SERVER: Echo(), PLAIN: Echo(), ENGINE: Echo(), WORKERS: Echo(wrong)}
    texts = {DOCUMENTS: Prompts(range(3000)), RECORDS: Prompts(range(3000))}
    bench = Bench(texts, cast("Any", AnyText()), SIZE)
    return asyncio.run(bench.run(clients)), clients


def test_every_contender_answers_the_same_requests():
    results, clients = run()
    bursts = [result for result in results if result.load == "burst"]
    assert {(r.contender, r.text, r.clients, r.sent) for r in bursts} == {
        (contender, text, at_once, requests)
        for contender in RATES
        for text in (DOCUMENTS, RECORDS)
        for at_once, requests in ((1, 4), (3, 6))
        if text == DOCUMENTS or contender in (SERVER, PLAIN)
    }
    assert all(not r.fault and not r.failed and not r.unfinished for r in results)
    assert clients[PLAIN].asked == 1 + 2 * (2 * 4 + 2 * 6)  # both texts, up and down
    assert clients[WORKERS].asked == 1 + 2 * (4 + 6)
    assert [r.contender for r in results if r.load != "burst"] == [SERVER]


def test_other_samples_than_the_servers_are_a_fault():
    results, _ = run(wrong=3)
    faults = {r.contender: r.fault for r in results if r.fault}
    assert faults == {WORKERS: "other samples than the server's"}
    assert all(result.goodput == 0 for result in of(results, WORKERS, DOCUMENTS))


def test_a_faster_burst_does_not_hide_what_went_wrong_in_the_other():
    [fast, slow, *_] = sorted(of(measured(), SERVER, DOCUMENTS), key=lambda each: each.wall_s)
    assert shown_of(slow, fast) is shown_of(fast, slow) is fast
    for wrong in (replace(slow, fault="other samples"), replace(slow, failed=1)):
        assert shown_of(wrong, fast) is shown_of(fast, wrong) is wrong


def measured() -> list[LoadResult]:
    """Of 100 tokens; with three clients the server is half as fast."""
    return [
        LoadResult(
            name, "burst", text, clients,
            wall_s=100 / (rate * (0.5 if name == SERVER and clients == 3 else 1)),
            answers={0: ((1,), [0] * 100)},
        )
        for name, rate in RATES.items()
        for text in (DOCUMENTS, RECORDS)
        for clients in (3, 1)
        if text == DOCUMENTS or name in (SERVER, PLAIN)
    ]  # fmt: skip


def test_targets_are_of_the_worst_number_of_clients():
    values = {target.name: (target.value, target.met) for target in targets(measured())}
    assert values[f"{SERVER}: throughput at 3 clients, of the best burst's"] == (0.5, False)
    assert values[f"{PLAIN}: throughput at 3 clients, of the best burst's"] == (1.0, True)
    assert values[f"{DOCUMENTS}: with drafts, times without, least"] == (0.45, False)
    assert values["one engine, times two workers, least"] == (2.0, True)


def test_the_picture_is_drawn_where_a_contender_has_one_text_alone(tmp_path: Path):
    draw(measured(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
