"""Rewards by webhook: closed episodes of sessions that name one are asked about until answered."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud.captures.rewards import Scored, reward_of
from tinkercloud.captures.trajectories import Trajectory, episode_key, trajectories
from tinkercloud.services.captures.capture_results import trajectory_json
from tinkercloud.services.captures.webhook_sender import WebhookFailed, WebhookSender
from tinkercloud.storage.capture_rewards import CaptureRewardStorage, Delivery
from tinkercloud.storage.captures import Capture, CapturedTurn, CaptureStorage

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_ATTEMPTS = 6
FIRST_DELAY_S = 2.0  # doubled at each further attempt
MAX_CONCURRENT = 8
REWARD_KEY = "webhook"


@dataclass(frozen=True, slots=True)
class _State:
    """Of a session in which nothing is left to ask: until it changes it is not read again."""

    num_turns: int
    closed_at: float | None


class RewardWebhooks:
    def __init__(
        self, captures: CaptureStorage, rewards: CaptureRewardStorage, sender: WebhookSender
    ):
        self._captures = captures
        self._rewards = rewards
        self._sender = sender
        self._settled: dict[str, _State] = {}

    async def run_forever(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(PERIOD_S)

    async def sweep(self) -> None:
        """One attempt for each trajectory that is due."""
        for user, capture_id in await self._rewards.with_webhook():
            capture = await self._captures.get(user, capture_id)
            if capture is None:
                continue
            state = _State(capture.num_turns, capture.closed_at)
            if self._settled.get(capture_id) != state and await self._ask_all(capture):
                self._settled[capture_id] = state

    async def _ask_all(self, capture: Capture) -> bool:
        """Whether nothing is left to ask."""
        turns = await self._captures.turns(capture)
        await self._close_idle(capture, turns)
        rewards = await self._rewards.by_target(capture.capture_id)
        deliveries = await self._rewards.deliveries(capture.capture_id)
        closed = await self._rewards.closed(capture.capture_id)
        waiting = 0
        room = asyncio.Semaphore(MAX_CONCURRENT)
        tasks: list[asyncio.Task[bool]] = []
        for trajectory in trajectories(turns):
            if reward_of(trajectory, rewards) is not None:
                continue
            delivery = deliveries.get(trajectory.trajectory_id)
            if delivery is not None and delivery.next_at is None:
                continue
            is_open = capture.closed_at is None and _key(trajectory) not in closed
            if is_open or (delivery is not None and (delivery.next_at or 0) > time.time()):
                waiting += 1
                continue
            attempts = 0 if delivery is None else delivery.attempts
            tasks.append(asyncio.create_task(self._ask(capture, trajectory, attempts, room)))
        settled = await asyncio.gather(*tasks)
        return waiting == 0 and all(settled)

    async def _close_idle(self, capture: Capture, turns: Sequence[CapturedTurn]) -> None:
        last: dict[str, float] = {}
        for turn in turns:
            last[episode_key(turn.group, turn.episode)] = turn.created_at
        for key, created_at in last.items():
            if created_at + capture.details["idle_s"] < time.time():
                await self._rewards.close(capture.capture_id, key)

    async def _ask(
        self, capture: Capture, trajectory: Trajectory, attempts: int, room: asyncio.Semaphore
    ) -> bool:
        """Whether this was the last attempt."""
        question = trajectory_json(Scored(trajectory, None), capture)
        question |= {
            "capture_id": capture.capture_id,
            "metadata": capture.details.get("metadata"),
        }
        details, name = capture.details, trajectory.trajectory_id
        try:
            async with room:
                value = await self._sender.ask(
                    details["webhook"], details["webhook_secret"], question
                )
        except WebhookFailed as error:
            attempts += 1
            next_at = time.time() + FIRST_DELAY_S * 2 ** (attempts - 1)
            delivery = Delivery(name, attempts, next_at, str(error))
            if attempts >= MAX_ATTEMPTS:
                logger.warning("no reward for trajectory %s: %s", name, error)
                delivery = Delivery(name, attempts, None, str(error))
            await self._rewards.put_delivery(capture.capture_id, delivery)
            return delivery.next_at is None
        await self._rewards.put(capture.capture_id, f"trajectory:{name}", REWARD_KEY, value)
        await self._rewards.put_delivery(
            capture.capture_id, Delivery(name, attempts + 1, None, None)
        )
        return True


def _key(trajectory: Trajectory) -> str:
    return episode_key(trajectory.group, trajectory.episode)
