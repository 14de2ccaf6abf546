"""What the summary of the benchmarks claims, each with where its figures are in the results.

Nothing here is a figure: `render.py` takes them from benchmarks/results/.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lib.report import Cell, Report

Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Figure:
    """text: with its unit, and whose it is."""

    value: float
    text: str


Finder = Callable[[Sequence[Row]], Figure | None]
"""The figure in a result's rows; None where it was not measured."""


@dataclass(frozen=True)
class Claim:
    """result: of benchmarks/results/, whatever the instruction set (`ResultName.shared`). peer: the
    best one's figure, or a baseline's. target: the name of the result's target, or of several, of
    which it has one. less: whether a smaller figure is the better one. times: where the result has
    the ratio itself, of figures that were not rounded."""

    result: str
    text: str
    ours: Finder
    peer: Finder | None = None
    target: str | tuple[str, ...] = ""
    less: bool = False
    times: Finder | None = None

    def ratio(self, rows: Sequence[Row], ours: Figure, peer: Figure) -> float:
        """Above 1: ours is ahead."""
        if self.times is not None and (times := self.times(rows)) is not None:
            return times.value
        return peer.value / ours.value if self.less else ours.value / peer.value


@dataclass(frozen=True)
class Best:
    """The best figure of a column, of the rows with these cells. label: whose it is, if it is not
    the row's contender. peers: of other contenders than ours alone."""

    column: str
    unit: str
    cells: Row
    label: str = ""
    less: bool = False
    peers: bool = False

    def __call__(self, rows: Sequence[Row]) -> Figure | None:
        figures = [(float(row[self.column]), row) for row in rows if self._fits(row)]
        if not figures:
            return None
        value, row = (min if self.less else max)(figures, key=lambda figure: figure[0])
        label = self.label or (str(row.get("contender", "")) if self.peers else "")
        return Figure(value, f"{short(value)} {self.unit} {label}".strip())

    def _fits(self, row: Row) -> bool:
        if any(row[column] != cell for column, cell in self.cells.items()):
            return False
        if self.peers and str(row["contender"]).lower().startswith("tinkercloud"):
            return False
        return is_number(row[self.column])


@dataclass(frozen=True)
class Count:
    """How many of the rows have these cells."""

    cells: Row

    def __call__(self, rows: Sequence[Row]) -> Figure | None:
        fitting = [row for row in rows if all(row[c] == cell for c, cell in self.cells.items())]
        return Figure(len(fitting), f"{len(fitting)} of {len(rows)}")


def is_number(cell: Cell) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rows_of(report: Report) -> list[Row]:
    return [dict(zip(report.columns, row, strict=True)) for row in report.rows]


# ---- the claims


def sampling(dtype: str, at_once: str, prompt: int = 64) -> Claim:
    cells: Row = {"dtype": dtype, "prompt": prompt, "at once": at_once}
    long = f", prompts of {prompt}" if prompt > 64 else ""
    return Claim(
        f"sampling-{dtype}",
        f"sampling, {dtype}, {at_once} at once{long}",
        Best("tokens/s", "tokens/s", cells | {"contender": "tinkercloud"}),
        Best("tokens/s", "tokens/s", cells, peers=True),
        f"{dtype}, prompt {prompt}, {at_once} at once: times the best peer",
    )


def streaming(prompt: int, at_once: int, what: str, column: str) -> Claim:
    dtype = "bfloat16"
    cells: Row = {"dtype": dtype, "prompt": prompt, "at once": at_once}
    where = f"prompt {prompt}, {at_once} at once"
    return Claim(
        "streaming",
        f"streams, {dtype}, {where}: {what}",
        Best(column, "ms", cells | {"contender": "tinkercloud"}, less=True),
        Best(column, "ms", cells, less=True, peers=True),
        f"{dtype}, {where}: {what}, best peer's time by ours",
        less=True,
    )


def training(dtype: str, batch: str) -> Claim:
    """In float32 the target is of the machine's limit: twice PEFT would be beyond it."""
    cells: Row = {"dtype": dtype, "batch": batch}
    aim = "share of the matrix limit" if dtype == "float32" else "tokens/s over PEFT's best"
    return Claim(
        "training",
        f"LoRA training, {dtype}, {batch}",
        Best("tokens/s", "tokens/s", cells | {"contender": "Tinkercloud"}),
        Best("tokens/s", "tokens/s", cells, peers=True),
        f"{batch}, {dtype}: {aim}",
        times=Best("x our time", "", cells, less=True, peers=True),
    )


def training_memory(dtype: str, batch: str) -> Claim:
    cells: Row = {"dtype": dtype, "batch": batch}
    return Claim(
        "training",
        f"LoRA training, {dtype}, {batch}: peak memory",
        Best("peak GB", "GB", cells | {"contender": "Tinkercloud"}, less=True),
        Best("peak GB", "GB", cells, less=True, peers=True),
        f"{batch}, {dtype}: peak memory over PEFT, best",
        less=True,
    )


def rl_step(contender: str, text: str, target: str) -> Claim:
    column = "seconds per step"
    return Claim(
        "rl_step",
        text,
        Best(column, "s", {"contender": contender}, less=True),
        Best(column, "s", {}, less=True, peers=True),
        target,
        less=True,
    )


def speculation(load: str, at_once: int, *targets: str) -> Claim:
    cells: Row = {"load": load, "at once": at_once}
    return Claim(
        "speculation",
        f"speculation: {load}, {at_once} at once",
        Best("with drafts tokens/s", "tokens/s", cells),
        Best("plain tokens/s", "tokens/s", cells, "without drafts"),
        targets,
    )


def rl_epochs(at_once: int) -> Claim:
    """With AMX the aim is a multiple of plain's speed, elsewhere a share of the bound."""
    name = f"RL, {at_once} at once, epochs 2 and later"
    return speculation("RL, later epochs", at_once, f"{name}: times plain", f"{name}: of the bound")


def following(at_once: int) -> Claim:
    def of(server: str, label: str = "") -> Best:
        return Best(
            "tokens/s", "tokens/s", {"steps": "after", "at once": at_once, "server": server}, label
        )

    return Claim(
        "speculation_shift",
        f"a head that has followed its policy, {at_once} at once",
        of("head that follows"),
        of("without drafts", "(without drafts)"),
        f"head that follows, {at_once} at once, after the shift: times plain",
    )


def sharing(work: str) -> Claim:
    return Claim(
        "sharing",
        f"sampling and training at once: {work}",
        Best("tokens/s", "tokens/s", {"work": work, "alone or both": "both"}),
        Best("tokens/s", "tokens/s", {"work": work, "alone or both": "alone"}, "alone"),
        f"{work} keeps of its speed",
    )


def burst(contender: str, label: str = "", **cells: Cell) -> Best:
    of = {"contender": contender, "load": "burst", "text": "documents", **cells}
    return Best("goodput tokens/s", "tokens/s", of, label)


def cluster_overhead(through: str, baseline: str) -> Claim:
    column = "overhead p50 ms"
    return Claim(
        "cluster_overhead",
        f"overhead over Megatron's time, 64 datums: {through}",
        Best(column, "ms", {"through": through, "datums": 64}),
        Best(column, "ms", {"through": baseline}, f"({baseline})"),
        f"{through}, 64 datums: overhead p50",
        less=True,
    )


def recovery_cost(trained: str, text: str) -> Claim:
    return Claim(
        "recovery-steps",
        f"journal and snapshots, of a step of 16 tokens, {text}",
        Best("both %", "%", {"trained": trained, "step": "1 x 16"}),
        target=f"% of a step, {trained}, 1 x 16",
        less=True,
    )


def off_policy(samples: str, other: str) -> Claim:
    cells: Row = {"samples": samples}
    return Claim(
        "stable_reinforce",
        f"RL by stable_reinforce on samples of weights {samples}",
        Best("reward", "reward", cells | {"loss": "truncated at 2"}),
        Best("reward", "reward", cells | {"loss": other}, f"({other})"),
    )


CLAIMS = (
    *(sampling("bfloat16", at_once) for at_once in ("1", "8", "32", "128")),
    *(sampling("bfloat16", at_once, prompt=512) for at_once in ("1", "8")),
    *(sampling("float32", at_once) for at_once in ("1", "128")),
    *(streaming(512, at_once, "first token", "first p50 ms") for at_once in (1, 8)),
    *(streaming(64, at_once, "between tokens", "next p50 ms") for at_once in (1, 8)),
    *(training(dtype, "8 x 256") for dtype in ("bfloat16", "float32")),
    training("bfloat16", "ragged 32 x <= 512"),
    training_memory("float32", "8 x 256"),
    rl_step(
        "tinkercloud, bfloat16",
        "a step of RL, bfloat16 (peers: float32)",
        "speed of a step, times SkyRL's in bfloat16, theirs in float32",
    ),
    rl_step(
        "tinkercloud",
        "a step of RL, float32",
        "speed of a step, times SkyRL's",
    ),
    speculation("JSON", 1, "JSON, 1 at once, greedy: times plain"),
    speculation("arithmetic", 1, "arithmetic, 1 at once, greedy: times plain"),
    speculation("prose", 1, "prose, 1 at once: times plain"),
    following(1),
    following(4),
    rl_epochs(4),
    rl_epochs(8),
    rl_epochs(32),
    Claim(
        "gpu",
        "one GPU, an 8B network in bfloat16: decoding alone",
        Best("tokens/s", "tokens/s", {"shape": "Qwen3-8B", "work": "decode, graphs"}),
        target="Qwen3-8B: decoding alone, of the read bandwidth",
    ),
    Claim(
        "recovery-restart",
        "seconds from a kill of the server to accepted work, the longest",
        Best("accepted s", "s", {"killed": "server"}),
        target="seconds from a kill to accepted work",
        less=True,
    ),
    recovery_cost("LoRA 32", "LoRA of rank 32"),
    recovery_cost("full", "all parameters"),
    Claim(
        "deviation",
        "trained less sampled log-probabilities, bfloat16, largest",
        Best("largest", "nats", {"computed by": "compiled kernels", "dtype": "bfloat16"}),
        target="compiled kernels, bfloat16: largest",
    ),
    Claim(
        "concurrency",
        "throughput of 256 clients",
        burst("server", clients=256),
        burst("server", "(best burst)"),
        "server: throughput at 256 clients, of the best burst's",
    ),
    Claim(
        "concurrency",
        "throughput of 128 clients, without HTTP",
        burst("engine alone", clients=128),
        burst("two workers", "(prompts and tokens in two workers)", clients=128),
    ),
    sharing("sampling"),
    sharing("training"),
    cluster_overhead("Ray", "Ray, two empty calls"),
    cluster_overhead("Ray and service", "HTTP, two health checks"),
    Claim(
        "load-latency",
        "the service alone: optim_step by HTTP, p50",
        Best("p50 ms", "ms", {"client": "HTTP", "operation": "optim_step", "in flight": 1}),
        Best(
            "p50 ms",
            "ms",
            {"client": "HTTP", "operation": "health check (baseline)", "in flight": 1},
            "(health check)",
        ),
        "optim_step by HTTP, submitted and retrieved: p50 in ms",
        less=True,
    ),
    Claim(
        "load-latency",
        "the service alone: samples by HTTP, 32 in flight",
        Best(
            "per second",
            "a second",
            {"client": "HTTP", "operation": "sample", "in flight": 32},
        ),
        Best(
            "per second",
            "a second",
            {"client": "SDK", "operation": "sample", "in flight": 32},
            "(one process of the SDK)",
        ),
        "samples a second by HTTP",
    ),
    Claim(
        "pipeline",
        "drafts from another machine, a round trip of 0.3 passes away",
        Best("overlapped times", "times plain", {"passes": 0.3}),
        Best("serial times", "times plain", {"passes": 0.3}, "(serial)"),
        "round trip of 0.3 passes: overlapped / serial",
        times=Best("overlapped / serial", "times", {"passes": 0.3}),
    ),
    Claim(
        "proxy",
        "JSON by the proxy before our server without its own drafts",
        Best("proxy tokens/s", "tokens/s", {"target": "tinkercloud", "text": "JSON"}),
        Best("alone tokens/s", "tokens/s", {"target": "tinkercloud", "text": "JSON"}, "(alone)"),
        "tinkercloud, JSON: times the target alone",
        times=Best("times", "times", {"target": "tinkercloud", "text": "JSON"}),
    ),
    Claim(
        "cookbook_recipes-0.5.8",
        "recipes of the official cookbook 0.5.8, unmodified, that ended well",
        Count({"ended": "well"}),
    ),
    Claim(
        "cookbook_recipes-0.6.1",
        "recipes of the official cookbook 0.6.1, unmodified, that ended well",
        Count({"ended": "well"}),
    ),
    off_policy("16 steps old", "importance_sampling"),
    off_policy("3 bits", "ppo"),
)
