"""What happens in a run: the programs of two users, and the faults. All of it follows from a seed.

Faults of single messages are drawn by the number of the message, so that leaving one out (when a
failure is shrunk) changes no other.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

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
    "wait",
    "pause",
]
WEIGHTS: Mapping[Kind, float] = {
    "forward_backward": 30,
    "forward": 3,
    "optim_step": 18,
    "take_number": 1,
    "export": 1,
    "save_state": 6,
    "save_sampler": 4,
    "snapshot": 6,
    "inflight": 3,
    "sampler_of_path": 3,
    "sampler_of_base": 1,
    "sample": 14,
    "cancel": 1.5,
    "load_into": 2,
    "create_from_state": 2,
    "delete_model": 0.3,
    "delete_checkpoint": 1,
    "list": 2,
    "look": 6,
    "intrude": 1,
    "wait": 5,
    "pause": 3,
}
AGENT_WEIGHTS: Mapping[Kind, float] = {"chat": 4, "turn": 4, "captured": 3, "capture": 1}
AGENTS_AT = (
    "tinkercloud/storage/captures.py",
    "tinkercloud/services/captures/",
    "tinkercloud/services/chats/",
)
LOOK_WEIGHT = 6
"""Beside those of agents: there are many things to look at."""
USERS = ("ann", "bob")
BASES = ("sim/small", "sim/large")
VOCAB_SIZE = 24
AWAIT_RATE = 0.025
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
    """From the `count`-th change of the disk on, for so long: every write fails, for want of room
    (ENOSPC) or otherwise (EIO)."""

    count: int
    for_s: float
    error: Literal["ENOSPC", "EIO"]


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
EngineFate = Literal["fine", "die before", "die after", "slow", "out of memory"]
_NETWORK = (("lose request", 4), ("lose answer", 4), ("duplicate", 3), ("slow", 4), ("cut", 1))
_ENGINE = (("die before", 2), ("die after", 2), ("slow", 4), ("out of memory", 2))


@dataclass(frozen=True, slots=True)
class Schedule:
    """network_rate, engine_rate: shares of messages with a fault, up to the `last_fault`-th one.
    aimed: crashes beside the others, at moments that chance alone seldom meets. at_awaits: the same
    at awaits of the service, each by itself. await_rate: at this share of the awaits and flushes
    that a run comes to the service ends, and at each of places: names of these, as by `name_of`.
    idle_model_s, archive_bytes, session_ttl_s: the settings.
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
    session_ttl_s: float = 1e6
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


def generate(seed: int) -> Schedule:
    choices = random.Random(f"{seed} schedule")
    crashes = tuple(_crash(choices) for _ in range(choices.choice((1, 1, 2, 2, 3, 4))))
    schedule = Schedule(
        seed=seed,
        programs=tuple(_program(choices) for _ in USERS),
        crashes=crashes,
        disk=(_trouble(choices),) if choices.random() < 0.2 else (),
        network_rate=choices.choice((0.0, 0.01, 0.05, 0.15)),
        engine_rate=choices.choice((0.0, 0.0, 0.02, 0.06)),
        give_up_s=tuple(choices.choice((300.0, 300.0, 4.0)) for _ in USERS),
        in_order=choices.random() < 0.3,
        gap_grace_s=choices.choice((0.5, 5.0)),
        operation_s=choices.choice((0.002, 0.3, 1.5)),
        jumps=tuple(_jump(choices) for _ in range(choices.choice((0, 0, 1, 2)))),
        idle_model_s=choices.choice((1e6, 1e6, 2.0)),
        archive_bytes=random.Random(f"{seed} archive").choice((0, 3000, 10**9)),
        session_ttl_s=random.Random(f"{seed} session").choice((1e6, 1e6, 20.0)),
    )
    schedule = _aimed(schedule, random.Random(f"{seed} aimed"))
    schedule = _with_deletion(schedule, random.Random(f"{seed} deletion"))
    schedule = _with_agents(schedule, random.Random(f"{seed} agents"))
    is_at_awaits = random.Random(f"{seed} awaits").random() < 0.5
    schedule = replace(schedule, await_rate=AWAIT_RATE if is_at_awaits else 0.0)
    ways = random.Random(f"{seed} ways")
    return replace(
        schedule,
        commands=_commands(random.Random(f"{seed} commands")),
        all_is_large=ways.random() < 0.3,
        other_numerics_from=ways.choice((None, None, 1, 2)),
    )


def _aimed(schedule: Schedule, choices: random.Random) -> Schedule:
    """Of some, with crashes between two messages that belong together, or as a failure is told; or
    with what clients have given up arriving later than what they sent after it."""
    if choices.random() < 0.1:
        outage = Outage(choices.randint(8, 60), choices.choice((5.0, 8.0)))
        return replace(schedule, outage=outage, give_up_s=(4.0, 4.0))
    match choices.choices(("none", "snapshot", "failure"), (10, 4, 2))[0]:
        case "snapshot":
            calls = ("write_state", "copy_state", "publish", "restore")
            at = choices.choices(calls, (6, 1, 1, 1))[0]
            kinds: tuple[CrashKind, ...] = ("engine", "kill", "power")
            kind = choices.choices(kinds, (6, 1, 1))[0]
            crash = Crash(kind, "answered", choices.randint(1, 4), choices.choice((0.0, 2.0)), at)
            return replace(schedule, aimed=(crash,))
        case "failure":
            kind = choices.choice(("kill", "power"))
            crash = Crash(kind, "failed", choices.randint(1, 3), choices.choice((0.0, 2.0)))
            return replace(schedule, aimed=(crash,), engine_rate=0.06)
        case _:
            return schedule


def _with_deletion(schedule: Schedule, choices: random.Random) -> Schedule:
    """Of some, with a model that nothing has used yet and that is deleted, and perhaps a crash as
    what comes for it then is acknowledged."""
    if choices.random() > 0.2:
        return schedule
    number = choices.randrange(len(schedule.programs))
    program = schedule.programs[number]
    at = choices.randint(1, len(program) - 1)
    steps = (
        replace(_step(choices, "create_model"), seed=1),
        replace(_step(choices, "delete_model"), target=-1, size=choices.choice((3, 8)), seed=1),
    )
    programs = list(schedule.programs)
    programs[number] = (*program[:at], *steps, *program[at:])
    schedule = replace(schedule, programs=tuple(programs))
    if schedule.aimed or choices.random() < 0.5:
        return schedule
    kind: CrashKind = choices.choice(("kill", "power"))
    posts, deletion = "/api/v1/forward_backward", "/api/v1/unload_model"
    crash = Crash(kind, "answer", choices.randint(1, 3), 0.2, posts, deletion)
    return replace(schedule, aimed=(crash,))


def _with_agents(schedule: Schedule, choices: random.Random) -> Schedule:
    """Of half of them, with chats and capture sessions beside the users' scripts, and perhaps a
    crash within one of these, or as it is answered."""
    if choices.random() < 0.5:
        return schedule
    programs = []
    weights = {**AGENT_WEIGHTS, "look": LOOK_WEIGHT}
    for program in schedule.programs:
        steps = [*program[:1], _step(choices, "capture"), *program[1:]]
        for _ in range(choices.randint(4, 12)):
            kind = choices.choices(list(weights), list(weights.values()))[0]
            steps.insert(choices.randint(2, len(steps)), _step(choices, kind))
        programs.append(tuple(steps))
    schedule = replace(schedule, programs=tuple(programs))
    if choices.random() < 0.3:
        return schedule
    kind: CrashKind = choices.choice(("kill", "power"))
    crash = Crash(
        kind, "await", choices.randint(1, 12), 0.2, choices.choices(AGENTS_AT, (2, 1, 1))[0]
    )
    if choices.random() < 0.3:
        crash = Crash(kind, "answer", choices.randint(1, 4), 0.2, "/captures/")
    return replace(schedule, at_awaits=(crash,))


def _commands(choices: random.Random) -> tuple[Command, ...]:
    """Beside half of them."""
    if choices.random() < 0.5:
        return ()
    kinds = get_args(CommandKind)
    return tuple(
        Command(choices.choice(kinds), 60.0 * choices.random() ** 2, choices.getrandbits(32))
        for _ in range(choices.randint(1, 4))
    )


def _program(choices: random.Random) -> tuple[Step, ...]:
    kinds = list(WEIGHTS)
    # Swarm testing: each program lacks some kinds, so that others meet more often.
    weights = [WEIGHTS[kind] if choices.random() < 0.85 else 0.0 for kind in kinds]
    weights[kinds.index("forward_backward")] = 30
    steps = [_step(choices, "create_model")]
    steps += [
        _step(choices, choices.choices(kinds, weights)[0]) for _ in range(choices.randint(18, 26))
    ]
    if choices.random() < 0.3:
        steps.insert(choices.randint(1, len(steps)), _step(choices, "create_model"))
    while sum(step.kind not in ("wait", "pause") for step in steps) < 15:
        steps.append(_step(choices, "forward_backward"))
    if choices.random() < 0.15:
        steps.append(_step(choices, "finish_session"))
    return tuple(steps)


def _step(choices: random.Random, kind: Kind) -> Step:
    return Step(
        kind,
        target=choices.randrange(4),
        size=choices.choice((1, 1, 2, 3)),
        seed=choices.getrandbits(32),
        overwrite=choices.random() < 0.3,
        ttl_s=choices.choice((0, 0, 0, 0, 5, 60)),
    )


def _crash(choices: random.Random) -> Crash:
    kinds: tuple[CrashKind, ...] = ("kill", "power", "stop", "engine", "client")
    kind = choices.choices(kinds, (30, 35, 8, 22, 5))[0]
    trigger: Trigger
    trigger, most = choices.choice(
        (("step", 2000), ("disk", 1200), ("fsync", 300), ("message", 120), ("answer", 120),
         ("engine", 200))
    )  # fmt: skip
    # Early ones as often as late ones: the moments after a start are many to meet.
    count = int(most ** choices.random()) if choices.random() < 0.4 else choices.randint(1, most)
    return Crash(kind, trigger, count, choices.choice((0.0, 0.2, 2.0, 20.0)))


def _jump(choices: random.Random) -> ClockJump:
    by_s = choices.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0))
    return ClockJump(choices.uniform(0.0, 60.0), by_s)


def _trouble(choices: random.Random) -> DiskTrouble:
    error: Literal["ENOSPC", "EIO"] = "ENOSPC" if choices.random() < 0.75 else "EIO"
    return DiskTrouble(choices.randint(1, 400), choices.choice((0.0, 0.5, 5.0, 30.0)), error)
