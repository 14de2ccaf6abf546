"""The sampling benchmark's loads, its figures, and the alternating runs that measure them.

Samples are checked before a speed is kept.
"""

import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.attention_work import num_pairs
from benchmarks.lib.limits import Limits
from benchmarks.lib.peers import Unavailable
from benchmarks.lib.processes import awake, signal_family
from benchmarks.lib.report import Cell, table
from benchmarks.lib.timing import alternating, quantile
from benchmarks.peers.sampling_check import NOT_ROUNDING_NATS, GreedyCheck, Reference
from benchmarks.peers.sampling_common import Contender, Load, Outcome

CHECKED = 2  # sequences of every timed load whose tokens are checked
GREEDY = ((1, 48, 24), (8, 48, 24))  # prompts at once, their tokens, new tokens
LATENCY_RUNS = 3  # of a single request; loads of many have many first tokens
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    num_prompts: int
    num_samples: int = 1
    max_tokens: int = 128
    most_repeats: int = 5

    @property
    def at_once(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def shown(self) -> str:
        grouped = f"{self.num_prompts} x {self.num_samples}"
        return grouped if self.num_samples > 1 else str(self.at_once)

    @property
    def repeats(self) -> int:
        """Small loads are short, and a short time is easily disturbed."""
        return 5 if self.at_once == 1 else 3 if self.at_once <= 8 else 2

    @property
    def num_pairs(self) -> int:
        """Of a query and a key that it sees; a shared prompt's are counted once."""
        prompts = self.num_prompts * num_pairs(self.prompt_tokens)
        whole = self.prompt_tokens + self.max_tokens
        return prompts + self.at_once * num_pairs(whole, after=self.prompt_tokens)

    @property
    def work(self) -> float:
        """Rough cost, to foresee whether a load fits what is left of the time."""
        return self.at_once * self.max_tokens + self.num_prompts * self.prompt_tokens / 4


FULL = (
    *(Case(64, 1), Case(512, 1), Case(64, 8), Case(512, 8), Case(512, 2, 16), Case(64, 32)),
    *(Case(512, 32), Case(64, 128), Case(512, 128)),
)
QUICK = tuple(Case(64, count, max_tokens=32, most_repeats=2) for count in (1, 8))


class Prompts:
    """Slices of a text, each from another place: no two share a beginning, not even over repeats,
    so that no cache of an earlier load helps."""

    def __init__(self, ids: Sequence[int]):
        self._ids = list(ids)
        self._next = 0

    def take(self, count: int, length: int) -> tuple[tuple[int, ...], ...]:
        taken = []
        for _ in range(count):
            start = self._next % (len(self._ids) - length)
            taken.append(tuple(self._ids[start : start + length]))
            self._next += 7
        return tuple(taken)


@dataclass(frozen=True)
class Scale:
    """What a speed is held against. unembedding: the parameters that a prompt's rows do not pass
    through, because nothing is drawn after them. pair_flop: of a query and a key that it sees."""

    limits: Limits
    parameters: int
    unembedding: int
    pair_flop: float

    def of_reads(self, row: "Measured") -> float:
        """Of the read bandwidth, all weights read once per token."""
        read = self.parameters * DTYPE_BYTES[row.dtype] * row.tokens_s
        return read / (self.limits.read_gb_s * 1e9)

    def of_products(self, row: "Measured") -> float:
        """Of the matrix throughput: two operations per parameter and row, the prompts' rows too,
        and the products of attention."""
        prompts_s = row.prompt_tokens_s * (self.parameters - self.unembedding)
        work = 2 * (row.tokens_s * self.parameters + prompts_s) + row.pairs_s * self.pair_flop
        return work / (self.limits.gflop_s[row.dtype] * 1e9)


@dataclass
class Measured:
    """One contender's figures for one case."""

    contender: str
    dtype: str
    case: Case
    wall_s: float
    tokens: int
    failed: int
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    fault: str | None = None

    @property
    def tokens_s(self) -> float:
        """New tokens by the whole wall time, prompts included; 0 for wrong ones."""
        return 0.0 if self.fault else self.tokens / self.wall_s

    @property
    def prompt_tokens_s(self) -> float:
        """The prompts' tokens, a shared one counted once, by the same time."""
        rows = self.case.num_prompts * self.case.prompt_tokens
        return 0.0 if self.fault else rows / self.wall_s

    @property
    def pairs_s(self) -> float:
        """Of a query and a key, by the same time; where fewer tokens came, as many fewer."""
        came = self.tokens / (self.case.at_once * self.case.max_tokens)
        return 0.0 if self.fault else came * self.case.num_pairs / self.wall_s

    def cells(self, scale: Scale) -> tuple[Cell, ...]:
        alone = self.case.at_once == 1
        fraction = scale.of_reads(self) if alone else scale.of_products(self)
        share = f"{100 * fraction:.0f} % of {'reads' if alone else 'products'}"
        return (
            *(self.contender, self.dtype, self.case.prompt_tokens, self.case.shown),
            *(round(self.tokens_s, 1), self.fault or share, milliseconds(self.first_s, 0.5)),
            *(milliseconds(self.gaps_s, 0.5), milliseconds(self.gaps_s, 0.99), self.failed),
        )


COLUMNS = (
    *("contender", "dtype", "prompt", "at once", "tokens/s", "of the limit", "first token p50 ms"),
    *("between tokens p50 ms", "p99 ms", "failed"),
)


GREEDY_COLUMNS = ("contender", "dtype", "tokens", "differ", "first at", "largest gap, nats")


def greedy_table(checks: Sequence[tuple[str, str, GreedyCheck]]) -> str:
    """In Markdown."""
    rows = [
        (name, dtype, check.tokens, check.differing, check.first or "-", f"{check.gap_nats:.3f}")
        for name, dtype, check in checks
    ]
    return table(GREEDY_COLUMNS, rows, [False, False, True, True, True, True])


def milliseconds(seconds: Sequence[float], share: float) -> str:
    return f"{1e3 * quantile(seconds, share):.0f}" if seconds else "-"


def foreseen_s(case: Case, measured: Sequence[Measured]) -> float:
    """Of one run, by the best speed so far: too long where more sequences run at once than did."""
    return case.work / max(row.case.work / row.wall_s for row in measured)


@dataclass
class _Trial:
    """One contender in one case, with as many repeats as it has time for. best: its fastest.
    gone: it could not go on."""

    contender: Contender
    repeats: int
    best: Outcome | None = None
    timed: Outcome | None = None
    fault: str | None = None
    gone: bool = False
    spent_s: float = 0.0

    @property
    def ended(self) -> bool:
        return self.gone or self.fault is not None


@dataclass
class Bench:
    """What a run has, and its results. budget_s: timed seconds that each contender may take.
    between: called after each case, while all contenders are stopped. greedy: of each contender and
    number type."""

    cases: Sequence[Case]
    prompts: Prompts
    latencies: bool
    budget_s: float
    between: Callable[[], None]
    rows: list[Measured] = field(default_factory=list)
    greedy: list[tuple[str, str, GreedyCheck]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=dict)

    async def compete(self, contenders: list[Contender], reference: Reference, dtype: str) -> None:
        """All cases, each in alternating runs. Only one contender is ever awake."""
        right = []
        for contender in contenders:
            signal_family(contender.pid, signal.SIGSTOP)
        greedy = [Load(self.prompts.take(n, size), new, greedy=True) for n, size, new in GREEDY]
        for contender in contenders:
            with awake(contender):
                if await self._is_right(contender, greedy, reference, dtype):
                    right.append(contender)
        for case in self.cases:
            trials = [
                _Trial(contender, repeats)
                for contender in right
                if (repeats := self._repeats(f"{contender.name}, {dtype}", case))
            ]
            for trial in trials:
                await self._unless_unavailable(trial, self._prepare(trial, case))
            for repeat, trial in alternating(trials, case.repeats):
                if repeat < trial.repeats and not trial.ended:
                    await self._unless_unavailable(trial, self._once(trial, reference, case))
            for trial in trials:
                await self._conclude(trial, case, dtype)
            self.between()
            gone = [trial.contender for trial in trials if trial.gone]
            right = [contender for contender in right if contender not in gone]

    async def _is_right(
        self, contender: Contender, loads: Sequence[Load], reference: Reference, dtype: str
    ) -> bool:
        """By its greedy tokens of these loads; how they differ is recorded."""
        gaps = []
        for load in loads:
            try:
                await contender.prepare(load)
                outcome = await contender.generate(load)
            except Unavailable as reason:
                self.notes.append(f"{contender.name}: {reason}.")
                return False
            if outcome.failed:
                count = f"{outcome.failed} of {load.num_sequences} failed"
                self.notes.append(f"{contender.name} is wrong, and not timed: {count}.")
                return False
            gaps += map(reference.greedy_gaps, load.prompts, outcome.samples)
        check = GreedyCheck.of(gaps)
        self.greedy.append((contender.name, dtype, check))
        if check.gap_nats <= NOT_ROUNDING_NATS:
            return True
        off = f"a greedy token is {check.gap_nats:.1f} nats less likely than the likeliest"
        self.notes.append(f"{contender.name} is wrong, and not timed: {off}.")
        return False

    async def _unless_unavailable(self, trial: "_Trial", work: Awaitable[None]) -> None:
        start = time.perf_counter()
        try:
            with awake(trial.contender):
                await work
        except Unavailable as reason:
            self.notes.append(f"{trial.contender.name} gave up: {reason}")
            trial.gone = True
        trial.spent_s += time.perf_counter() - start

    async def _prepare(self, trial: "_Trial", case: Case) -> None:
        await trial.contender.prepare(self._load(case))

    async def _once(self, trial: "_Trial", reference: Reference, case: Case) -> None:
        load = self._load(case)
        outcome = await trial.contender.generate(load)
        if trial.best is None or outcome.failed or outcome.wall_s < trial.best.wall_s:
            trial.best, trial.fault = outcome, self._fault(reference, load, outcome)

    async def _time(self, trial: "_Trial", case: Case) -> None:
        for _ in range(LATENCY_RUNS if case.at_once == 1 else 1):
            timed = await trial.contender.latency(self._load(case))
            if timed is None:
                return
            trial.timed = timed if trial.timed is None else trial.timed.with_times(timed)

    async def _conclude(self, trial: "_Trial", case: Case, dtype: str) -> None:
        if self.latencies and trial.best is not None and not trial.ended:
            await self._unless_unavailable(trial, self._time(trial, case))
        if trial.gone or trial.best is None:
            return
        best, timed = trial.best, trial.timed or trial.best
        tokens = sum(map(len, best.samples))
        name = trial.contender.name
        row = Measured(
            *(name, dtype, case, best.wall_s, tokens, best.failed + timed.failed),
            *(timed.first_s, timed.gaps_s, trial.fault),
        )
        self.rows.append(row)
        key = f"{name}, {dtype}"
        self.spent_s[key] = self.spent_s.get(key, 0.0) + trial.spent_s
        print(f"{key}, {case}: {row.tokens_s:.1f} tokens/s", file=sys.stderr)

    def _load(self, case: Case) -> Load:
        prompts = self.prompts.take(case.num_prompts, case.prompt_tokens)
        return Load(prompts, case.max_tokens, case.num_samples)

    @staticmethod
    def _fault(reference: Reference, load: Load, outcome: Outcome) -> str | None:
        if outcome.failed:
            return f"{outcome.failed} failed"
        prompts = [prompt for prompt in load.prompts for _ in range(load.num_samples)]
        return reference.fault(prompts[-CHECKED:], outcome.samples[-CHECKED:])

    def _repeats(self, key: str, case: Case) -> int:
        """Of the contender in what is left of its time."""
        mine = [row for row in self.rows if f"{row.contender}, {row.dtype}" == key]
        if not mine:
            return case.repeats
        run_s = foreseen_s(case, mine)
        repeats = max(min(int((self.budget_s - self.spent_s[key]) / run_s), case.repeats), 0)
        if repeats < case.repeats:
            done = f"was run {repeats} of {case.repeats} times" if repeats else "was not run"
            self.notes.append(
                f"{key}: {case.prompt_tokens} tokens, {case.shown} at once {done}: about "
                f"{run_s:.0f} s each, over the {self.budget_s:.0f} s given to each contender."
            )
        return repeats
