"""Which reward belongs to which trajectory, and which advantage to which of its turns."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkercloud.captures.trajectories import Step, Trajectory, episode_key, times_shared

Advantages = Literal["centered", "raw"]
"""raw: the reward itself. centered: less the mean of its group's."""


@dataclass(frozen=True, slots=True)
class Scored:
    """reward: of the trajectory as a whole, its turns' rewards included; None where there is none.
    advantages: one for each turn."""

    trajectory: Trajectory
    reward: float | None
    advantages: tuple[float, ...] = ()


def reward_of(trajectory: Trajectory, rewards: Mapping[str, float]) -> float | None:
    """Its own reward, that of an earlier end of it, its episode's, its session's: the first that
    there is; plus the rewards of its turns. None where there is none of either."""
    turns = [turn_reward(step, rewards) for step in trajectory.steps]
    whole = _whole(trajectory, rewards)
    if whole is None and all(turn is None for turn in turns):
        return None
    return (whole or 0.0) + sum(turn or 0.0 for turn in turns)


def turn_reward(step: Step, rewards: Mapping[str, float]) -> float | None:
    return rewards.get(f"turn:{step.ref}")


def _whole(trajectory: Trajectory, rewards: Mapping[str, float]) -> float | None:
    targets = [f"trajectory:{step.ref}" for step in reversed(trajectory.steps)]
    if trajectory.episode is not None:
        targets.append(f"episode:{episode_key(trajectory.group, trajectory.episode)}")
    return next((rewards[target] for target in (*targets, "capture") if target in rewards), None)


def scored(
    trajectories: Sequence[Trajectory],
    rewards: Mapping[str, float],
    kind: Advantages,
    group: str | None,
) -> list[Scored]:
    """A turn's advantage: the trajectory's reward and those of its turns from this one on, less
    the mean reward of the group (centered). Where several trajectories share a turn it is divided
    by their number, so that its tokens count once. group: of trajectories that name none."""
    values = [reward_of(trajectory, rewards) for trajectory in trajectories]
    means = _means(trajectories, values, group)
    kept = [t for t, value in zip(trajectories, values, strict=True) if value is not None]
    shared = times_shared(kept)
    result: list[Scored] = []
    for trajectory, value in zip(trajectories, values, strict=True):
        if value is None:
            result.append(Scored(trajectory, None))
            continue
        baseline = means[trajectory.group or group] if kind == "centered" else 0.0
        remaining, advantages = value - baseline, list[float]()
        for step in trajectory.steps:
            advantages.append(remaining / shared[step.ref])
            remaining -= turn_reward(step, rewards) or 0.0
        result.append(Scored(trajectory, value, tuple(advantages)))
    return result


def _means(
    trajectories: Sequence[Trajectory], values: Sequence[float | None], group: str | None
) -> dict[str | None, float]:
    by_group: dict[str | None, list[float]] = defaultdict(list)
    for trajectory, value in zip(trajectories, values, strict=True):
        if value is not None:
            by_group[trajectory.group or group].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in by_group.items()}
