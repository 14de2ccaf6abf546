"""The order in which trainer and engines take the GPUs, and the lock that admits operations."""

import asyncio
import logging
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tinkercloud.cluster.gpus.memory import MOVES, Memory, Move, State
from tinkercloud.cluster.gpus.phases import Phases
from tinkercloud.errors import EngineDied

CYCLE = [
    "offload(rollout) kv_cache cuda_graph weights",
    "onload(train)",
    "offload(train)",
    "onload(rollout) weights",
    "update_weights v",
    "onload(rollout) cuda_graph",
    "onload(rollout) kv_cache",
]


class Gpus:
    """Both sides of one set of GPUs; counts what is resident, so that an overlap is seen.

    failing: the call that raises next. slow_s: how long each call takes.
    """

    def __init__(self, slow_s: float = 0.0):
        self.calls: list[str] = []
        self.failing = ""
        self.slow_s = slow_s
        self.train_resident = False
        self.rollout_resident: set[str] = set()
        self.overlapped = False
        self.train, self.rollout = Train(self), Rollout(self)

    async def call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(self.slow_s)
        if self.failing and name.startswith(self.failing):
            self.failing = ""
            raise EngineDied(f"{name} broke")
        self.overlapped |= self.train_resident and bool(self.rollout_resident)

    def memory(self) -> Memory:
        return Memory("gpus", self.train, self.rollout)

    def phases(self, *, colocated: bool = True, stay_s: float = 0.0) -> Phases:
        return Phases(self.train, self.rollout, colocated=colocated, stay_s=stay_s, linger_s=0.0)


class Train:
    def __init__(self, gpus: Gpus):
        self.gpus = gpus

    async def onload(self) -> int:
        self.gpus.train_resident = True
        await self.gpus.call("onload(train)")
        return 100

    async def offload(self) -> int:
        await self.gpus.call("offload(train)")
        self.gpus.train_resident = False
        return 100

    async def discard(self) -> None:
        self.gpus.calls.append("discard(train)")
        self.gpus.train_resident = False


class Rollout:
    def __init__(self, gpus: Gpus):
        self.gpus = gpus

    async def onload(self, tags: Sequence[str]) -> int:
        self.gpus.rollout_resident |= set(tags)
        await self.gpus.call(" ".join(("onload(rollout)", *tags)))
        return 10 * len(tags)

    async def update_weights(self, weights: str) -> int:
        await self.gpus.call(f"update_weights {weights}")
        return 7

    async def offload(self, tags: Sequence[str]) -> int:
        await self.gpus.call(" ".join(("offload(rollout)", *tags)))
        self.gpus.rollout_resident -= set(tags)
        return 10 * len(tags)

    async def discard(self) -> None:
        self.gpus.calls.append("discard(rollout)")
        self.gpus.rollout_resident.clear()


async def sample(phases: Phases, weights: str = "v", seconds: float = 0.0) -> None:
    async with phases.sampling(weights):
        await asyncio.sleep(seconds)


async def train(phases: Phases, seconds: float = 0.0) -> None:
    async with phases.training():
        await asyncio.sleep(seconds)


# ---- the order of moves


async def test_a_cycle_frees_and_restores_memory_in_the_required_order():
    gpus = Gpus()
    phases = gpus.phases()
    await sample(phases)
    gpus.calls.clear()
    await train(phases)
    await sample(phases)
    assert gpus.calls == CYCLE
    assert not gpus.overlapped


@pytest.mark.parametrize("state", State)
async def test_every_move_that_is_not_in_the_table_is_an_assertion(state):
    for move in set(Move) - set(MOVES[state]):
        memory = Gpus().memory()
        memory.state = state

        async def nothing() -> int:
            return 0

        with pytest.raises(AssertionError):
            await memory._move(move, nothing)


def test_no_path_through_the_table_brings_caches_before_weights_or_both_sides_together():
    """Every path of up to eight moves, walked."""
    paths = [((), State.EMPTY)]
    for _ in range(8):
        paths = [
            ((*moves, move), after) for moves, at in paths for move, after in MOVES[at].items()
        ]
        for moves, _state in paths:
            for before, move in pairwise(moves):
                if move is Move.ONLOAD_KV_CACHE:
                    assert before is Move.ONLOAD_CUDA_GRAPH
                if move is Move.ONLOAD_CUDA_GRAPH:
                    assert before is Move.UPDATE_WEIGHTS
            ups = [m for m in moves if m in (Move.ONLOAD_TRAIN, Move.OFFLOAD_TRAIN)]
            assert all(a is not b for a, b in pairwise(ups))


async def test_every_move_is_logged_with_its_bytes_and_milliseconds(caplog):
    caplog.set_level(logging.INFO)
    phases = Gpus().phases()
    await train(phases)
    await sample(phases)
    lines = [
        re.fullmatch(r"shared GPUs: (.*), (\d+) bytes, \d+\.\d ms", m) for m in caplog.messages
    ]
    assert [(Move(line[1]), int(line[2])) for line in lines if line] == [
        (Move.ONLOAD_TRAIN, 100),
        (Move.OFFLOAD_TRAIN, 100),
        (Move.ONLOAD_WEIGHTS, 10),
        (Move.UPDATE_WEIGHTS, 7),
        (Move.ONLOAD_CUDA_GRAPH, 10),
        (Move.ONLOAD_KV_CACHE, 10),
    ]
    assert phases.stats() | {"phase_ms": 0} == {
        "phase": "sampling",
        "phase_moves": 6,
        "phase_failures": 0,
        "phase_bytes": 237,
        "phase_ms": 0,
        "phase_waiting": 0,
    }


async def test_weights_move_only_for_a_sample():
    gpus = Gpus()
    phases = gpus.phases()
    for _ in range(3):
        await train(phases)
    assert gpus.calls == ["onload(train)"]


async def test_engines_that_sample_take_other_weights_in_place_and_the_same_ones_at_no_cost():
    gpus = Gpus()
    phases = gpus.phases()
    await sample(phases, "a")
    gpus.calls.clear()
    await sample(phases, "a")
    await sample(phases, "b")
    assert gpus.calls == ["update_weights b"]


async def test_on_separate_gpus_both_sides_stay_and_only_weights_are_updated():
    gpus = Gpus()
    phases = gpus.phases(colocated=False)
    await train(phases)
    await sample(phases, "a")
    gpus.calls.clear()
    await train(phases)
    await sample(phases, "b")
    assert gpus.calls == ["update_weights b"]


async def test_on_separate_gpus_training_and_sampling_run_at_the_same_time():
    phases = Gpus().phases(colocated=False)
    inside = asyncio.Event()

    async def long_sample() -> None:
        async with phases.sampling("v"):
            inside.set()
            await asyncio.sleep(30)

    sampling = asyncio.create_task(long_sample())
    await inside.wait()
    async with asyncio.timeout(5):
        await train(phases)
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)


# ---- the phase lock


async def test_operations_of_one_phase_run_together_and_other_phases_wait():
    phases = Gpus().phases()
    inside: list[str] = []
    most: dict[str, int] = {}

    async def operation(kind: str) -> None:
        phase = phases.training() if kind == "train" else phases.sampling(kind)
        async with phase:
            inside.append(kind)
            assert set(inside) == {kind}
            most[kind] = max(most.get(kind, 0), len(inside))
            await asyncio.sleep(0.01)
            inside.remove(kind)

    kinds = ["train", "a", "b"] * 4
    await asyncio.gather(*(operation(kind) for kind in kinds))
    assert most == {"train": 4, "a": 4, "b": 4}


@pytest.mark.parametrize("greedy", ["train", "sample"])
async def test_an_endless_stream_of_one_phase_does_not_starve_the_other(greedy):
    phases = Gpus().phases(stay_s=0.02)
    operations = {"train": train, "sample": sample}
    (other,) = operations.keys() - {greedy}

    async def stream() -> None:
        while True:
            await operations[greedy](phases, seconds=0.01)

    streams = [asyncio.create_task(stream()) for _ in range(4)]
    await asyncio.sleep(0.05)
    begun = asyncio.get_running_loop().time()
    for _ in range(3):
        await operations[other](phases)
    waited_s = asyncio.get_running_loop().time() - begun
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    assert waited_s < 20  # of a busy machine; one that starves waits for ever


async def test_a_phase_admits_newcomers_for_its_stay_then_yields():
    gpus = Gpus()
    phases = gpus.phases(stay_s=1.0)
    order: list[str] = []

    async def operation(kind: str, seconds: float) -> None:
        async with phases.training() if kind == "train" else phases.sampling("v"):
            order.append(kind)
            await asyncio.sleep(seconds)

    tasks = [asyncio.create_task(operation("sample", 2.0))]
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(operation("train", 0.0)))
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(operation("sample", 0.0)))  # within the stay
    await asyncio.sleep(1.2)
    tasks.append(asyncio.create_task(operation("sample", 0.0)))  # after it
    await asyncio.gather(*tasks)
    assert order == ["sample", "sample", "train", "sample"]


async def test_a_phase_lingers_for_the_next_operation_of_a_lane():
    gpus = Gpus()
    phases = Phases(gpus.train, gpus.rollout, colocated=True, stay_s=1.0, linger_s=0.05)
    first = asyncio.create_task(train(phases, 0.5))
    await asyncio.sleep(0.01)
    sampling = asyncio.create_task(sample(phases))
    await first
    await train(phases)  # a step later, while the sample waits
    await sampling
    assert gpus.calls.count("onload(train)") == 1


# ---- failures


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ("onload(train)", "discard(train)"),
        ("onload(rollout) weights", "discard(rollout)"),
        ("update_weights", "discard(rollout)"),
        ("onload(rollout) cuda_graph", "discard(rollout)"),
        ("onload(rollout) kv_cache", "discard(rollout)"),
    ],
)
async def test_a_side_that_fails_to_load_is_discarded_and_loads_at_the_next_call(failing, left):
    gpus = Gpus()
    phases = gpus.phases()
    operation = train if "train" in failing else sample
    gpus.failing = failing
    with pytest.raises(EngineDied, match="broke"):
        await operation(phases)
    assert gpus.calls[-1] == left
    await operation(phases)
    assert phases.stats()["phase_failures"] == 1
    assert not gpus.overlapped


@pytest.mark.parametrize("failing", ["offload(train)", "offload(rollout)"])
async def test_a_side_that_fails_to_offload_is_discarded_and_the_other_one_loads(failing):
    gpus = Gpus()
    phases = gpus.phases()
    first, second = (train, sample) if "train" in failing else (sample, train)
    await first(phases)
    gpus.failing = failing
    await second(phases)
    assert failing.replace("offload", "discard") in gpus.calls
    await first(phases)
    assert not gpus.overlapped


async def test_all_waiters_of_a_phase_that_failed_get_its_error_and_others_do_not():
    gpus = Gpus(slow_s=0.01)
    phases = gpus.phases()
    gpus.failing = "update_weights"
    samples = [asyncio.create_task(sample(phases)) for _ in range(3)]
    training = asyncio.create_task(train(phases))
    ended = await asyncio.gather(*samples, training, return_exceptions=True)
    assert [type(result) for result in ended] == [EngineDied] * 3 + [type(None)]


async def test_ranks_that_died_are_restarted_by_the_next_training_operation():
    gpus = Gpus()
    phases = gpus.phases()
    async with phases.training():
        await phases.lose_train()
    await train(phases)
    assert gpus.calls == ["onload(train)", "discard(train)", "onload(train)"]


async def test_engines_that_died_are_restarted_by_the_next_sample():
    gpus = Gpus()
    phases = gpus.phases()
    async with phases.sampling("v"):
        await phases.lose_rollout()
    gpus.calls.clear()
    await sample(phases)
    assert gpus.calls == CYCLE[3:]


# ---- cancellation


async def test_a_caller_cancelled_while_it_waits_leaves_the_queue():
    phases = Gpus().phases()
    async with phases.training():
        waiting = asyncio.create_task(sample(phases))
        await asyncio.sleep(0.01)
        assert phases.stats()["phase_waiting"] == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert phases.stats()["phase_waiting"] == 0
    await train(phases)


async def test_a_caller_cancelled_during_a_transition_does_not_break_it():
    gpus = Gpus(slow_s=0.02)
    phases = gpus.phases()
    await sample(phases)
    gpus.calls.clear()
    waiting = asyncio.create_task(train(phases))
    await asyncio.sleep(0.03)  # in the middle of it
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await sample(phases)
    assert gpus.calls == CYCLE
    assert not gpus.overlapped


async def test_an_operation_cancelled_inside_leaves_the_lock():
    phases = Gpus().phases()
    inside = asyncio.create_task(train(phases, seconds=30))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(sample(phases))
    inside.cancel()
    async with asyncio.timeout(5):
        await waiting


async def test_closing_refuses_waiters_and_newcomers():
    gpus = Gpus(slow_s=0.05)
    phases = gpus.phases()
    await train(phases)
    waiting = asyncio.create_task(sample(phases))
    await asyncio.sleep(0.01)  # it is being changed to
    await phases.close()
    for operation in (waiting, train(phases)):
        with pytest.raises(EngineDied, match="given back"):
            await operation
