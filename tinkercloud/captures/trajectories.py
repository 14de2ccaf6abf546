"""Turns of a capture session as trees; each path from a first turn to a last answer a trajectory.

A turn goes on from the answer that its conversation repeats. Turns without such an answer begin
trees: the agent's own, those of its sub-agents, another episode's. Turns with the same parent and
the same conversation are retries of each other; samples of one turn (n > 1) are its siblings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkercloud.storage.captures import CapturedSample, CapturedTurn, SampleRef

Branches = Literal["continued", "all"]
"""continued: of retries and of samples of one turn only those that the agent went on with. Where it
went on with none, the latest retry counts, with all of its samples. all: every one."""

_Attempt = tuple[str | None, str | None, SampleRef | None, str]


@dataclass(frozen=True, slots=True)
class Step:
    """A turn and the one of its samples that the trajectory went on with, or ended with."""

    turn: CapturedTurn
    sample: CapturedSample

    @property
    def ref(self) -> SampleRef:
        return SampleRef(self.turn.turn_id, self.sample.index)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Its id is its last sample's, so a trajectory that goes on gets another one."""

    steps: tuple[Step, ...]

    @property
    def trajectory_id(self) -> str:
        return str(self.steps[-1].ref)

    @property
    def group(self) -> str | None:
        return self.steps[0].turn.group

    @property
    def episode(self) -> str | None:
        return self.steps[0].turn.episode

    @property
    def num_sampled(self) -> int:
        return sum(len(step.sample.tokens) for step in self.steps)


def episode_key(group: str | None, episode: str | None) -> str:
    """ "" for turns without labels. Labels have no slash."""
    return (episode or "") if group is None else f"{group}/{episode or ''}"


def trajectories(
    turns: Iterable[CapturedTurn], branches: Branches = "continued"
) -> list[Trajectory]:
    """Those of a tree together, trees in the order of their first turns. turns: the oldest
    first."""
    ordered = list(turns)
    turn_ids = {turn.turn_id for turn in ordered}
    children: dict[SampleRef | None, list[CapturedTurn]] = defaultdict(list)
    for turn in ordered:
        # A parent is always on record before its child; without it the turn begins a tree.
        parent = turn.parent if turn.parent and turn.parent.turn_id in turn_ids else None
        children[parent].append(turn)
    chosen = ordered if branches == "all" else _chosen(ordered, children)
    return list(_paths(chosen, children, branches))


def times_shared(chosen: Sequence[Trajectory]) -> Mapping[SampleRef, int]:
    """How many of these trajectories go through a sample."""
    return Counter(step.ref for trajectory in chosen for step in trajectory.steps)


def _chosen(
    turns: Sequence[CapturedTurn], children: Mapping[SampleRef | None, Sequence[CapturedTurn]]
) -> list[CapturedTurn]:
    attempts: dict[_Attempt, list[CapturedTurn]] = defaultdict(list)
    for turn in turns:
        attempts[turn.group, turn.episode, turn.parent, turn.digest].append(turn)
    kept: list[CapturedTurn] = []
    for retries in attempts.values():
        continued = [turn for turn in retries if _continued(turn, children)]
        kept += continued or retries[-1:]
    names = {turn.turn_id for turn in kept}
    return [turn for turn in turns if turn.turn_id in names]


def _continued(
    turn: CapturedTurn, children: Mapping[SampleRef | None, Sequence[CapturedTurn]]
) -> list[CapturedSample]:
    return [s for s in turn.samples if children.get(SampleRef(turn.turn_id, s.index))]


def _paths(
    chosen: Sequence[CapturedTurn],
    children: Mapping[SampleRef | None, Sequence[CapturedTurn]],
    branches: Branches,
) -> Iterable[Trajectory]:
    """By a stack instead of recursion: an agent may take thousands of turns."""
    names = {turn.turn_id for turn in chosen}
    stack: list[tuple[tuple[Step, ...], CapturedTurn]] = []
    stack += [((), turn) for turn in reversed(children.get(None, ())) if turn.turn_id in names]
    while stack:
        before, turn = stack.pop()
        samples = turn.samples
        if branches == "continued":
            samples = _continued(turn, children) or samples
        later: list[tuple[tuple[Step, ...], CapturedTurn]] = []
        for sample in samples:
            steps = (*before, Step(turn, sample))
            following = children.get(steps[-1].ref, ())
            following = [child for child in following if child.turn_id in names]
            if not following:
                yield Trajectory(steps)
            later += [(steps, child) for child in following]
        stack += reversed(later)
