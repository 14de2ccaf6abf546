"""Draws schedules: all of one follows from its seed."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from tests.simulation.schedule import (
    AGENT_WEIGHTS,
    LITTLE_BYTES,
    SCENES,
    USERS,
    ClockJump,
    Command,
    CommandKind,
    Crash,
    CrashKind,
    DiskTrouble,
    Kind,
    Outage,
    Schedule,
    Step,
    Trigger,
)

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
AGENTS_AT = (
    "tinkercloud/storage/captures.py",
    "tinkercloud/services/captures/",
    "tinkercloud/services/chats/",
)
LOOK_WEIGHT = 6
"""Beside those of agents: there are many things to look at."""
MAX_SCENES = 4
"""Of a program."""
LONG = 3
MUCH_BYTES = 10**9
MINUTE_DAYS = 1 / 1440
FEW_CHECKPOINTS = 20_000
"""Bytes: of some."""
AWAIT_RATE = 0.025


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
        archive_bytes=random.Random(f"{seed} archive").choice((0, 3000, MUCH_BYTES)),
        session_ttl_s=random.Random(f"{seed} session").choice((1e6, 1e6, 20.0)),
    )
    settings = random.Random(f"{seed} settings")
    schedule = replace(
        schedule,
        archive_days=settings.choice((30.0, 30.0, MINUTE_DAYS)),
        published_bytes=settings.choice((*[10**9] * 5, LITTLE_BYTES)),
        drain_s=settings.choice((20.0, 20.0, 0.0, 0.3)),
        checkpoint_bytes=settings.choice((*[10**18] * 5, FEW_CHECKPOINTS)),
    )
    schedule = _aimed(schedule, random.Random(f"{seed} aimed"))
    schedule = _with_deletion(schedule, random.Random(f"{seed} deletion"))
    schedule = _with_agents(schedule, random.Random(f"{seed} agents"))
    schedule = _with_scenes(schedule, random.Random(f"{seed} scenes"))
    is_at_awaits = random.Random(f"{seed} awaits").random() < 0.5
    schedule = replace(schedule, await_rate=AWAIT_RATE if is_at_awaits else 0.0)
    ways = random.Random(f"{seed} ways")
    is_cut = schedule.archive_bytes < MUCH_BYTES or schedule.archive_days < 1
    return replace(
        schedule,
        commands=_commands(random.Random(f"{seed} commands"), is_cut=is_cut),
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


def _with_scenes(schedule: Schedule, choices: random.Random) -> Schedule:
    """Of half of them; some of these have a full disk for long, or as a file has its place and no
    row yet."""
    if choices.random() < 0.5:
        return schedule
    programs = []
    for program in schedule.programs:
        steps = list(program)
        for _ in range(choices.randint(1, MAX_SCENES)):
            steps.insert(choices.randint(len(steps) // 3, len(steps)), _step(choices, "scene"))
        if schedule.published_bytes == LITTLE_BYTES:
            silence = Step("scene", size=LONG, seed=SCENES.index("fall_silent"))
            steps.insert(choices.randint(len(steps) * 2 // 3, len(steps)), silence)
        programs.append(tuple(steps))
    match (
        choices.choices(("none", "long", "at a rename"), (6, 2, 2))[0] if not schedule.disk else ""
    ):
        case "long":
            trouble = DiskTrouble(choices.randint(100, 600), 40.0, "ENOSPC")
            stop = Crash("stop", "message", choices.randint(1, 60), 0.2)
            schedule = replace(schedule, disk=(trouble,), aimed=schedule.aimed or (stop,))
        case "at a rename":
            trouble = DiskTrouble(choices.randint(1, 4), 1.0, "ENOSPC", "after rename")
            schedule = replace(schedule, disk=(trouble,))
        case _:
            pass
    return replace(schedule, programs=tuple(programs))


def _commands(choices: random.Random, *, is_cut: bool) -> tuple[Command, ...]:
    """Beside half of them, and more where only the ends of runs are kept."""
    if choices.random() < 0.5 and not is_cut:
        return ()
    kinds = get_args(CommandKind)
    return tuple(
        Command(choices.choice(kinds), 60.0 * choices.random() ** 2, choices.getrandbits(32))
        for _ in range(choices.randint(3, 7) if is_cut else choices.randint(1, 4))
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
