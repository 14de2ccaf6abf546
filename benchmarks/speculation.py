"""Samples with drafts against the same samples without, in alternating runs in one process.

Structured text one at a time, greedy; epochs of RL over the same prompts with a policy that learns
in between; many at once, where drafts do not pay; requests of all kinds as they come. Every sample
is compared, token by token and bit by bit, before a speed is reported.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.candidates import times_chain
from benchmarks.lib.fixed_lengths import Hindsight, fixed
from benchmarks.lib.machine import machine, versions
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.smollm2 import weights
from benchmarks.speculation_rl import Epochs, LocalModel, PolicyLoop, RlScale
from tinkercloud.commands.bench import (
    PROSE,
    STRUCTURED,
    Comparison,
    Turns,
    Workload,
    compared,
    in_turns,
)
from tinkercloud.core.types import FromBase, SampleRequest, SamplingParams
from tinkercloud.embedded.drafting.step_costs import round_costs
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import runner_for
from tinkercloud.embedded.model.device import freeze_garbage_collector
from tinkercloud.speculative.draft_length.costs import CostTable

STRUCTURED_TIMES, PROSE_TIMES, LEAST_TIMES = 2.5, 0.98, 0.95
LATER_TIMES = {4: 2.0}  # RL, epochs 2 and later, by samples at once
LATER_TIMES_AMX = {8: 2.0, 32: 1.4}  # elsewhere LEAST_TIMES of the bound
OF_BEST_FIXED = 0.98
PLAIN, DRAFTS = "plain", "with drafts"
SHORT = 8  # samples of prose, which take a second together
STREAM, STREAM_BATCH, STREAM_LEVEL = "as they come", 32, 8
CONTEXT = 100.0  # tokens, of the table of round times
SECOND = 0.3  # of tokens that a first candidate missed, those that a second one is taken to have
COLUMNS = (
    *("load", "temperature", "at once", "plain tokens/s", "with drafts tokens/s", "times"),
    *("best fixed length", "its times", "bound"),
    *("tokens a pass", "drafting ms a pass", "verifying ms a pass"),
    *("plain p99 answer ms", "with drafts p99 answer ms"),
)


@dataclass(frozen=True)
class Scale:
    """tokens: of a structured sample. repeats: of one. even_repeats: of prose, where a fiftieth
    counts, which is less than a machine's speed varies by; short_repeats of eight samples at most,
    where a run is a second. most: samples at once; most_fixed: likewise, where fixed lengths run
    too. come: requests that come as they come, of up to twice `many_tokens`."""

    tokens: int = 256
    repeats: int = 15
    even_repeats: int = 15
    short_repeats: int = 25
    most: int = 128
    most_fixed: int = 32
    many_tokens: int = 48
    come: int = 64
    rl: RlScale = field(default_factory=RlScale)

    def repeats_of(self, workload: Workload) -> int:
        if workload.name in STRUCTURED:
            return self.repeats
        return self.short_repeats if workload.at_once <= SHORT else self.even_repeats


QUICK = Scale(
    tokens=48,
    repeats=1,
    even_repeats=1,
    short_repeats=1,
    most=8,
    many_tokens=16,
    come=8,
    rl=RlScale(epochs=2, prompts=2, samples=4, answer_tokens=16, at_once=(8,), lessons=1, takes=1),
)


class Loads:
    def __init__(self, model: LocalModel, scale: Scale):
        self._model, self._scale = model, scale
        self._version = model.store.version(model.store.publish(FromBase("smollm2")))
        base, threads = model.base, model.threads
        runner = runner_for(base, threads)
        layout = runner.kv_layout(base)
        pool = BlockPool(base.config, model.dtype, base.device, 2048, layout)
        self.table = round_costs(base, runner, pool, threads)
        freeze_garbage_collector()  # as the engine's process does

    def costs(self) -> str:
        """How many times as long as a plain round one with so many drafted tokens each takes."""
        table, drafted = self.table, (1, 2, 4, 8)
        lines = [
            "| at once | plain round ms | " + " | ".join(f"{k} drafted" for k in drafted) + " |",
            "|---:|---:|" + "---:|" * len(drafted),
        ]
        for at_once in (1, 2, 4, 8, 16, 32):
            plain = table.plain_ms(at_once, CONTEXT)
            rows = np.array([at_once * (1 + k) for k in drafted], np.float64)
            ratios = table.verify_ms(rows, at_once, CONTEXT) / plain
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {at_once} | {plain:.1f} | {cells} |")
        return "\n".join(lines)

    def candidates(self) -> str:
        """What trees with two candidates for a position bring at most, as a multiple of chains."""
        accepted = (0.3, 0.5, 0.7, 0.9)
        lines = [
            "| at once | " + " | ".join(f"{first:.0%} accepted" for first in accepted) + " |",
            "|---:|" + "---:|" * len(accepted),
        ]
        for at_once in (1, 2, 4, 8, 16, 32):
            rows = np.array([at_once * (1 + k) for k in range(9)], np.float64)
            costs = self.table.verify_ms(rows, at_once, CONTEXT).tolist()
            gains = [times_chain(first, SECOND, costs) for first in accepted]
            lines.append(f"| {at_once} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |")
        return "\n".join(lines)

    def workloads(self) -> Iterator[Workload]:
        scale = self._scale
        for name, text in STRUCTURED.items():
            yield Workload(name, self._version, (self._request(text, scale.tokens, 0, 0.0),))
        for at_once in (1, 8, 32, 128):
            if at_once <= scale.most:
                together = tuple(
                    self._request(PROSE, scale.many_tokens, seed, 1.0) for seed in range(at_once)
                )
                yield Workload("prose", self._version, together)
        yield self._stream()

    def _stream(self) -> Workload:
        """Texts of all kinds; as many tokens are asked for in a second as the machine writes with
        STREAM_LEVEL samples at once."""
        scale, generator = self._scale, np.random.default_rng(0)
        lengths = generator.integers(scale.many_tokens // 2, 2 * scale.many_tokens, scale.come)
        texts = (*STRUCTURED.values(), PROSE)
        requests = tuple(
            self._request(texts[i % len(texts)], int(tokens), i, 1.0)
            for i, tokens in enumerate(lengths)
        )
        token_s = 1e-3 * self.table.plain_ms(STREAM_LEVEL, CONTEXT) / STREAM_LEVEL
        gaps = generator.exponential(float(lengths.mean()) * token_s, scale.come)
        return Workload(STREAM, self._version, requests, tuple(np.cumsum(gaps).tolist()))

    def _request(self, text: str, tokens: int, seed: int, temperature: float) -> SampleRequest:
        params = SamplingParams(tokens, seed, temperature, use_eos=False)
        return SampleRequest(np.array(self._model.encode(text), np.int32), 1, params)


# ---- rows and targets


Measured = tuple[list[tuple[Cell, ...]], list[Target]]


def measured(workload: Workload, model: LocalModel, scale: Scale, table: CostTable) -> Measured:
    at_once = min(workload.at_once, STREAM_BATCH) if workload.arrivals_s else workload.at_once
    engines = model.engines(at_once)
    contenders = {PLAIN: engines.plain(), DRAFTS: engines}
    lengths = fixed(engines) if at_once <= scale.most_fixed else {}
    contenders |= {f"{length} drafted": factory for length, factory in lengths.items()}
    found = in_turns(workload, contenders, scale.repeats_of(workload))
    comparison = compared(workload, found[PLAIN], found[DRAFTS])
    hindsight = hindsight_of(found, lengths)
    row = load_row(comparison, at_once, hindsight, hindsight.bound(table, at_once, CONTEXT))
    targets = load_targets(comparison, hindsight)
    for target in targets:
        print(target.line(), file=sys.stderr, flush=True)
    return [row], targets


def hindsight_of(found: Mapping[str, Turns], lengths: Iterable[int]) -> Hindsight:
    times, acceptance = {}, {}
    for length in lengths:
        seen = found[f"{length} drafted"]
        assert seen.acceptance is not None
        times[length] = seen.times(found[PLAIN])
        acceptance[length] = seen.acceptance
    return Hindsight(times, acceptance)


def hindsight_cells(hindsight: Hindsight, bound: float) -> tuple[Cell, ...]:
    if not hindsight.times:
        return ("-", "-", "-")
    length, times = hindsight.best
    return (length, round(times, 2), round(bound, 2))


def load_row(
    comparison: Comparison, at_once: int, hindsight: Hindsight, bound: float
) -> tuple[Cell, ...]:
    workload, cells = comparison.workload, comparison.cells()
    tails = (round(comparison.plain.p99_ms), round(comparison.drafted.p99_ms))
    load = (*cells[:2], f"<= {at_once}" if workload.arrivals_s else at_once)
    fixed_cells = hindsight_cells(hindsight, bound)
    return (*load, *cells[3:6], *fixed_cells, cells[6], *cells[8:10], *tails)


def load_targets(comparison: Comparison, hindsight: Hindsight) -> list[Target]:
    workload, times = comparison.workload, comparison.times
    name = f"{workload.name}, {workload.at_once} at once"
    if workload.arrivals_s:
        name = f"{workload.at_once} requests {workload.name}"
    goal = PROSE_TIMES if workload.name == "prose" else LEAST_TIMES
    if workload.name in STRUCTURED:
        name, goal = f"{name}, greedy", STRUCTURED_TIMES
    return [Target.at_least(f"{name}: times plain", times, goal), *of_fixed(name, times, hindsight)]


def of_fixed(name: str, times: float, hindsight: Hindsight) -> list[Target]:
    if not hindsight.times:
        return []
    of_best = times / hindsight.best[1]
    return [Target.at_least(f"{name}: of the best fixed length", of_best, OF_BEST_FIXED)]


def epoch_rows(epochs: Epochs, table: CostTable) -> list[tuple[Cell, ...]]:
    seen = epochs.acceptance
    assert seen is not None
    passes = tuple(round(value, 2) for value in (seen.per_pass, seen.draft_ms, seen.verify_ms))
    rows = []
    for name, first, last in (("RL, epoch 1", 0, 1), ("RL, later epochs", 1, len(epochs.tokens))):
        some = slice(first, last)
        tokens = sum(epochs.tokens[some])
        if tokens:
            plain_s, drafted_s = epochs.plain_s.typical(some), epochs.drafted_s.typical(some)
            speeds = (round(tokens / plain_s, 1), round(tokens / drafted_s, 1))
            times = round(epochs.times(first, last), 2)
            hindsight = epochs.hindsight(first, last)
            bound = hindsight.bound(table, epochs.at_once, CONTEXT)
            cells = hindsight_cells(hindsight, bound)
            rows.append((name, 1.0, epochs.at_once, *speeds, times, *cells, *passes, "-", "-"))
    return rows


def epoch_targets(epochs: Epochs, table: CostTable, *, on_amx: bool) -> list[Target]:
    at_once, num_epochs = epochs.at_once, len(epochs.tokens)
    if num_epochs < 2:
        return []
    name, times = f"RL, {at_once} at once, epochs 2 and later", epochs.times(1)
    hindsight = epochs.hindsight(1, num_epochs)
    goals = LATER_TIMES | (LATER_TIMES_AMX if on_amx else {})
    if at_once in goals:
        target = Target.at_least(f"{name}: times plain", times, goals[at_once])
    else:
        bound = hindsight.bound(table, at_once, CONTEXT)
        target = Target.at_least(f"{name}: of the bound", times / bound, LEAST_TIMES)
    return [target, *of_fixed(name, times, hindsight)]


def main() -> None:
    parser = BenchmarkParser("speculation", __doc__, quick="short samples, two epochs")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory() as scratch:
        model = LocalModel(weights(), Path(scratch))
        loads = Loads(model, scale)
        table = loads.table
        pairs = [measured(workload, model, scale, table) for workload in loads.workloads()]
        runs = PolicyLoop(model, scale.rl).run()
    on_amx = machine()["instruction_set"] == "amx"
    pairs += [
        (epoch_rows(epochs, table), epoch_targets(epochs, table, on_amx=on_amx)) for epochs in runs
    ]
    report = Report(
        title="Speculation",
        about=description(model, scale, loads, runs),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row for rows, _ in pairs for row in rows],
        versions=versions("tinkercloud", "torch"),
        targets=[target for _, targets in pairs for target in targets],
    )
    report.publish(options.json, by_instruction_set=True)


def description(model: LocalModel, scale: Scale, loads: Loads, runs: Sequence[Epochs]) -> str:
    return about(
        ABOUT.format(
            dtype=str(model.dtype).removeprefix("torch."),
            scale=scale,
            costs=loads.costs(),
            candidates=loads.candidates(),
            second=SECOND,
            rewards=", ".join(f"{reward:.2f}" for reward in runs[0].rewards),
            at_once=" and ".join(map(str, scale.rl.at_once)),
            level=STREAM_LEVEL,
        )
    )


ABOUT = """\
SmolLM2-135M-Instruct in {dtype}, the suffix drafter under its draft-length controller, against the
same engine without drafts, in turns, in each of which the machine is as fast for all: of the ratios
of the turns the median counts, and of the speeds. Before a speed is reported all tokens and
log-probabilities of both are compared, bit by bit. JSON, code and arithmetic: one sample of
{scale.tokens} tokens that continues such a text. Prose: one prompt, samples of
{scale.many_tokens} tokens. As they come: {scale.come} requests of all four kinds, of
{scale.many_tokens} tokens on average and a quarter more, by a Poisson process that requests as many
tokens a second as the machine writes with {level} at once; tokens/s until the last answer, an
answer's time from its request. Each of these runs begins with an empty drafter. RL:
{scale.rl.prompts} prompts with {scale.rl.samples} samples of up to {scale.rl.answer_tokens} tokens,
{at_once} decoded at once, {scale.rl.epochs} epochs; the policy is a LoRA adapter of rank 16 that
learned the form of an answer in {scale.rl.lessons} steps, and is updated after every epoch, so that
drafts come from text of its earlier versions; {scale.rl.takes} times over, in turns as well; mean
rewards {rewards}. *tokens a pass*: of each sample, and of all epochs together.

*best fixed length*: the suffix drafter with so many tokens asked for in every round, in
the same alternating runs, chosen when all is known; 0: none. *bound*: what the best of them would
come to if a round took what the table below says, as if drafting took no time. In these runs a
length drafts only where earlier text says something.

The time of a round, as a multiple of a plain one (100 tokens of context): the most that drafts can
gain is their tokens a pass over this.

{costs}

Two candidates for a position would bring at most so many times the tokens/s of one by this table,
if the second had {second:.0%} of the tokens that the first missed and drafting cost nothing:

{candidates}"""

if __name__ == "__main__":
    main()
