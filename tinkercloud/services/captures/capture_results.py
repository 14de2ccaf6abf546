"""What comes out of a capture session: trajectories, rewards, datums."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinker_gmi.bodies.captures import CaptureRewardRequest
from tinkercloud.captures.datums import LOSSES, datum
from tinkercloud.captures.rewards import Advantages, Scored, scored
from tinkercloud.captures.trajectories import (
    Branches,
    Trajectory,
    episode_key,
    trajectories,
)
from tinkercloud.errors import CaptureFull, InvalidField
from tinkercloud.services.captures.capture_service import CaptureService
from tinkercloud.storage.capture_rewards import CaptureRewardStorage
from tinkercloud.storage.captures import Capture, CaptureStorage, SampleRef

MAX_REWARDS = 100_000  # of one session
_ID_PREFIXES = ("chatcmpl-", "msg_")  # of answers, as agents see them


@dataclass(frozen=True, slots=True)
class TrajectoryQuery:
    """group, episode: those alone; None: all. complete: of episodes that are closed."""

    branches: Branches = "continued"
    group: str | None = None
    episode: str | None = None
    limit: int = 1000
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DatumQuery:
    loss: str = "importance_sampling"
    advantages: Advantages = "centered"


class CaptureResults:
    def __init__(
        self, service: CaptureService, captures: CaptureStorage, rewards: CaptureRewardStorage
    ):
        self._service = service
        self._captures = captures
        self._rewards = rewards

    async def reward(self, user: str, capture_id: str, body: CaptureRewardRequest) -> str:
        """The target. Raises InvalidField for a turn or a trajectory that is not there, and
        CaptureNotFound where the session was deleted meanwhile."""
        capture = await self._service.require(user, capture_id)
        named = [n for n in ("trajectory", "turn", "episode") if getattr(body, n) is not None]
        if len(named) > 1:
            raise InvalidField(named[1], f"name one of {' and '.join(named)}, not both")
        target = "capture"
        if body.episode is not None:
            target = f"episode:{episode_key(body.group, body.episode)}"
        elif named:
            field, name = named[0], getattr(body, named[0])
            ref = _sample_ref(name)
            if ref is None or not await self._captures.has(capture, ref):
                raise InvalidField(field, f"{field} {name[:200]!r} is not in this capture session")
            target = f"{field}:{ref}"
        if await self._rewards.number(capture_id) >= MAX_REWARDS:
            raise CaptureFull(f"this session has {MAX_REWARDS} rewards; start another one")
        await self._rewards.put(capture_id, target, body.key, body.value)
        await self._service.require(user, capture_id)
        return target

    async def trajectories(
        self, user: str, capture_id: str, query: TrajectoryQuery
    ) -> list[dict[str, Any]]:
        trajectories, capture = await self._scored(user, capture_id, query, "raw")
        deliveries = await self._rewards.deliveries(capture_id)
        views: list[dict[str, Any]] = []
        for item in _page(trajectories, query):
            views.append(trajectory_json(item, capture))
            delivery = deliveries.get(item.trajectory.trajectory_id)
            if delivery is not None:
                attempts = {"attempts": delivery.attempts, "error": delivery.error}
                views[-1]["webhook"] = attempts
        return views

    async def datums(
        self, user: str, capture_id: str, query: TrajectoryQuery, form: DatumQuery
    ) -> dict[str, Any]:
        """Trajectories without a reward are counted and left out."""
        if form.loss not in LOSSES:
            text = f"loss is {form.loss!r}; datums are made for {', '.join(LOSSES)}"
            raise InvalidField("loss", text)
        trajectories, capture = await self._scored(user, capture_id, query, form.advantages)
        rewarded = [item for item in trajectories if item.reward is not None]
        page = _page(rewarded, query)

        def convert() -> list[dict[str, Any]]:
            return [_datum_json(item, form.loss, capture) for item in page]

        data = await asyncio.to_thread(convert)
        return {
            "data": data,
            "num_trajectories": len(rewarded),
            "num_without_reward": len(trajectories) - len(rewarded),
        }

    async def _scored(
        self, user: str, capture_id: str, query: TrajectoryQuery, advantages: Advantages
    ) -> tuple[list[Scored], Capture]:
        capture = await self._service.require(user, capture_id)
        turns = await self._captures.turns(capture)
        chosen = [
            trajectory
            for trajectory in trajectories(turns, query.branches)
            if query.group in (None, trajectory.group)
            and query.episode in (None, trajectory.episode)
        ]
        rewards = await self._rewards.by_target(capture_id)
        return scored(chosen, rewards, advantages, capture.details.get("group")), capture


def trajectory_json(item: Scored, capture: Capture) -> dict[str, Any]:
    """Without tokens: messages, and what was sampled with which weights."""
    trajectory = item.trajectory
    return _head(item, capture) | {
        "tools": trajectory.steps[0].turn.details.get("tools", []),
        "messages": messages_of(trajectory),
        "turns": [
            {
                "turn_id": step.turn.turn_id,
                "sample": str(step.ref),
                "created_at": step.turn.created_at,
                "finish_reason": step.sample.finish_reason,
                "num_prompt_tokens": len(step.turn.prompt),
                "num_sampled_tokens": len(step.sample.tokens),
                **{name: step.turn.details[name] for name in ("model", "weights", "params")},
            }
            for step in trajectory.steps
        ],
    }


def messages_of(trajectory: Trajectory) -> list[Any]:
    return [
        message
        for step in trajectory.steps
        for message in (*step.turn.messages, step.sample.message)
    ]


def _datum_json(item: Scored, loss: str, capture: Capture) -> dict[str, Any]:
    advantages = list(item.advantages)
    return _head(item, capture) | {"advantages": advantages, "datum": datum(item, loss)}


def _head(item: Scored, capture: Capture) -> dict[str, Any]:
    trajectory = item.trajectory
    versions = [step.turn.details["weights"]["version"] for step in trajectory.steps]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group": trajectory.group or capture.details.get("group"),
        "episode": trajectory.episode,
        "reward": item.reward,
        "versions": list(dict.fromkeys(versions)),
        "num_turns": len(trajectory.steps),
        "num_sampled_tokens": trajectory.num_sampled,
    }


def _page(trajectories: Sequence[Scored], query: TrajectoryQuery) -> Sequence[Scored]:
    return trajectories[query.offset : query.offset + query.limit]


def _sample_ref(name: str) -> SampleRef | None:
    """Of "TURN:INDEX"; a turn's id alone, as in its answer, stands for its first sample."""
    for prefix in _ID_PREFIXES:
        name = name.removeprefix(prefix)
    turn_id, _, index = name.partition(":")
    return SampleRef(turn_id, int(index or 0)) if re.fullmatch(r"[0-9]{0,4}", index) else None
