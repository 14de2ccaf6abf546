"""What happens in a run: the programs of two users, and the faults. All of it follows from a seed.

Faults of single messages are drawn by the number of the message, so that leaving one out (when a
failure is shrunk) changes no other.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal[
    "forward_backward",
    "forward",
    "optim_step",
    "take_number",
    "export",
    "save_state",
    "save_sampler",
    "snapshot",
    "inflight",
    "sampler_of_path",
    "sampler_of_base",
    "sample",
    "cancel",
    "load_into",
    "create_model",
    "create_from_state",
    "delete_model",
    "delete_checkpoint",
    "finish_session",
    "list",
    "look",
    "intrude",
    "chat",
    "capture",
    "turn",
    "captured",
    "scene",
    "wait",
    "pause",
]
AGENT_WEIGHTS: Mapping[Kind, float] = {"chat": 4, "turn": 4, "captured": 3, "capture": 1}
USERS = ("ann", "bob")
BASES = ("sim/small", "sim/large")
VOCAB_SIZE = 24
LITTLE_BYTES = 1
"""Of published weights: less than anything has."""
SCENES = (
    *("share", "share", "borrow", "copy", "train_with_loss", "train_on_record", "download"),
    *("fall_silent", "read_twice", "sample_without_session", "join_twice", "ask_too_much"),
    *("load_by_name", "be_rewarded"),
)
"""By the seed of a step."""
MAX_AT_AWAITS = 8
"""Crashes of one run, where it ends at awaits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a client. target: which of its models, or samplers, counted around. size: chunks,
    samples, or seconds. seed: of its numbers. overwrite: a name that is saved more than once.
    ttl_s: of what is saved; 0: no end."""

    kind: Kind
    target: int = 0
    size: int = 1
    seed: int = 0
    overwrite: bool = False
    ttl_s: int = 0


CrashKind = Literal["kill", "power", "stop", "engine", "client"]
Trigger = Literal[
    "step", "disk", "fsync", "message", "answer", "engine", "answered", "failed", "await"
]


@dataclass(frozen=True, slots=True)
class Crash:
    """kind: what ends. At the `count`-th event of that sort, from the previous crash on; of those
    whose label begins with `at`, and after one whose label begins with `after`."""

    kind: CrashKind
    trigger: Trigger
    count: int
    down_s: float
    at: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class DiskTrouble:
    """From the `count`-th change of the disk on whose label begins with `at`, for so long: every
    write fails, for want of room (ENOSPC) or otherwise (EIO)."""

    count: int
    for_s: float
    error: Literal["ENOSPC", "EIO"]
    at: str = ""


@dataclass(frozen=True, slots=True)
class ClockJump:
    """The wall clock is set, by so many seconds; time itself goes on as it does."""

    at_s: float
    by_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """Of the network, from the `count`-th message on: what clients send is held back and arrives
    afterwards, in any order, while they are told at once that their connections broke."""

    count: int
    for_s: float


CommandKind = Literal["replay", "branch", "receipt of step", "receipt of sample", "diff"]


@dataclass(frozen=True, slots=True)
class Command:
    """About a run that is kept, beside the server."""

    kind: CommandKind
    at_s: float
    seed: int


NetworkFate = Literal["fine", "lose request", "lose answer", "duplicate", "slow", "cut"]
EngineFate = Literal["fine", "die before", "die after", "slow", "out of memory", "memory short"]
_NETWORK = (("lose request", 4), ("lose answer", 4), ("duplicate", 3), ("slow", 4), ("cut", 1))
_ENGINE = (
    *(("die before", 2), ("die after", 2), ("slow", 4)),
    *(("out of memory", 2), ("memory short", 1)),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """network_rate, engine_rate: shares of messages with a fault, up to the `last_fault`-th one.
    aimed: crashes beside the others, at moments that chance alone seldom meets. at_awaits: the same
    at awaits of the service, each by itself. await_rate: at this share of the awaits and flushes
    that a run comes to the service ends, and at each of places: names of these, as by `name_of`.
    idle_model_s, archive_bytes, archive_days, session_ttl_s, published_bytes, drain_s: as the
    settings. checkpoint_bytes: the second user's quota.
    all_is_large: as for `patches.simulated`. other_numerics_from: as for the engine.
    without: faults that are left out, as "network 17"."""

    seed: int
    programs: tuple[tuple[Step, ...], ...]
    crashes: tuple[Crash, ...]
    disk: tuple[DiskTrouble, ...]
    network_rate: float
    engine_rate: float
    give_up_s: tuple[float, ...]
    in_order: bool
    gap_grace_s: float
    operation_s: float
    jumps: tuple[ClockJump, ...] = ()
    idle_model_s: float = 1e6
    archive_bytes: int = 10**9
    archive_days: float = 30.0
    session_ttl_s: float = 1e6
    published_bytes: int = 10**9
    drain_s: float = 20.0
    checkpoint_bytes: int = 10**18
    aimed: tuple[Crash, ...] = ()
    at_awaits: tuple[Crash, ...] = ()
    await_rate: float = 0.0
    places: frozenset[str] = frozenset()
    outage: Outage | None = None
    commands: tuple[Command, ...] = ()
    all_is_large: bool = False
    other_numerics_from: int | None = None
    last_fault: int = 500
    without: frozenset[str] = field(default_factory=frozenset)

    @property
    def num_operations(self) -> int:
        return sum(step.kind not in ("wait", "pause") for p in self.programs for step in p)

    def network_fate(self, number: int) -> NetworkFate:
        return self._fate("network", number, self.network_rate, _NETWORK)

    def engine_fate(self, number: int) -> EngineFate:
        return self._fate("engine", number, self.engine_rate, _ENGINE)

    def crash_at(self, place: str) -> Crash | None:
        """What comes at an await or a flush, where it is one of those. Each that a run meets is as
        likely as any other, however seldom it is met and however short it is. place: without
        lines, so that a seed stays what it is when others change."""
        choices = random.Random(f"{self.seed} await {place}")
        is_drawn = choices.random() < self.await_rate
        kinds: tuple[CrashKind, ...] = ("kill", "power")
        kind, count = choices.choice(kinds), choices.choice((1, 1, 2, 4))
        if place in self.places:
            return Crash(kind, "await", 1, 0.2, place)
        return Crash(kind, "await", count, 0.2, place) if is_drawn else None

    def _fate(
        self, stream: str, number: int, rate: float, fates: tuple[tuple[str, int], ...]
    ) -> "NetworkFate | EngineFate":
        if number > self.last_fault or f"{stream} {number}" in self.without:
            return "fine"
        choices = random.Random(f"{self.seed} {stream} {number}")
        if choices.random() >= rate:
            return "fine"
        names, weights = zip(*fates, strict=True)
        return choices.choices(names, weights)[0]

    def calm(self) -> "Schedule":
        """The same without any fault."""
        calm = replace(self, crashes=(), disk=(), jumps=(), aimed=(), at_awaits=(), outage=None)
        calm = replace(calm, await_rate=0.0, places=frozenset())
        return replace(calm, network_rate=0.0, engine_rate=0.0)
