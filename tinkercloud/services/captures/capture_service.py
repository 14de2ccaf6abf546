"""Capture sessions: an agent's base URL leads into one, and all that it samples there is kept."""

import math
import secrets
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tinker_gmi.bodies.captures import ChangeCaptureRequest, CreateCaptureRequest
from tinkercloud.captures.trajectories import episode_key
from tinkercloud.chat.turn import TurnHooks
from tinkercloud.config import Config
from tinkercloud.errors import (
    CaptureClosed,
    CaptureFull,
    CaptureNotFound,
    InvalidRequest,
    ModelNotFound,
)
from tinkercloud.services.captures.capture_recorder import CaptureRecorder, TurnPlace
from tinkercloud.services.captures.webhook_hosts import WebhookHosts
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.storage.capture_rewards import CaptureRewardStorage
from tinkercloud.storage.captures import Capture, CaptureStorage
from tinkercloud.storage.metadata import MetadataStorage

MAX_CAPTURES = 10_000  # of one user
MAX_TTL_S = 365 * 24 * 3600.0
MAX_METADATA_CHARACTERS = 64 * 1024
DEFAULT_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class CaptureStores:
    captures: CaptureStorage
    rewards: CaptureRewardStorage
    metadata: MetadataStorage


class CaptureService:
    def __init__(self, config: Config, stores: CaptureStores, names: ModelNames, texts: TextModels):
        self._config = config
        self._captures = stores.captures
        self._rewards = stores.rewards
        self._metadata = stores.metadata
        self._names = names
        self._texts = texts
        self._hosts = WebhookHosts.of(config.reward_hosts)

    async def create(self, user: str, body: CreateCaptureRequest) -> Capture:
        """Raises InvalidRequest, UnknownModelName, ModelNotFound, CaptureFull."""
        details: dict[str, Any] = await self._weights(user, body)
        if len(str(body.metadata)) > MAX_METADATA_CHARACTERS:
            raise InvalidRequest(f"metadata may have {MAX_METADATA_CHARACTERS} characters")
        ttl_s = self._config.capture_ttl_s if body.ttl_s is None else body.ttl_s
        if ttl_s > MAX_TTL_S:
            raise InvalidRequest(f"ttl_s is {ttl_s:g}; it may be {MAX_TTL_S:g}, a year, at most")
        if body.webhook is not None:
            self._hosts.require(body.webhook)
            details |= {"webhook": body.webhook, "webhook_secret": secrets.token_hex(32)}
            details["idle_s"] = body.idle_s or DEFAULT_IDLE_S
        if (await self._captures.usage(user))[0] >= MAX_CAPTURES:
            raise CaptureFull(f"there are {MAX_CAPTURES} capture sessions; delete some first")
        details |= {"group": body.group, "metadata": body.metadata}
        now = time.time()
        capture = Capture(f"cap-{uuid.uuid4().hex}", user, details, ttl_s, now, now)
        await self._captures.add(capture)
        return capture

    async def change(self, user: str, capture_id: str, body: ChangeCaptureRequest) -> Capture:
        """Other weights from the next turn on; turns underway keep theirs."""
        capture = await self.require(user, capture_id)
        kept = {k: v for k, v in capture.details.items() if k not in ("model", "follow")}
        details = kept | await self._weights(user, body)
        await self._captures.set_details(user, capture_id, details)
        return await self.require(user, capture_id)

    async def _weights(
        self, user: str, body: CreateCaptureRequest | ChangeCaptureRequest
    ) -> dict[str, Any]:
        if (body.model is None) == (body.follow is None):
            raise InvalidRequest(
                "name what is sampled: either model (a base model, a tinker:// path, the id of a "
                "sampling session) or follow (the id of a training run)"
            )
        if body.model is not None:
            await self._names.resolve(user, body.model)
            return {"model": body.model}
        assert body.follow is not None
        if await self._metadata.model(body.follow, user) is None:
            raise ModelNotFound(body.follow)
        return {"follow": body.follow}

    async def require(self, user: str, capture_id: str) -> Capture:
        """Raises CaptureNotFound."""
        capture = await self._captures.get(user, capture_id)
        if capture is None or capture.used_at + capture.ttl_s < time.time():
            raise CaptureNotFound(capture_id)
        return capture

    async def page(self, user: str, limit: int, offset: int) -> list[Capture]:
        return await self._captures.page(user, limit, offset)

    async def delete(self, user: str, capture_id: str) -> None:
        await self.require(user, capture_id)
        await self._captures.delete(user, capture_id)

    async def close(self, user: str, capture_id: str, place: TurnPlace) -> Capture:
        """An episode, or without one the whole session: no further turns."""
        capture = await self.require(user, capture_id)
        if place.episode is None:
            await self._captures.close(user, capture_id)
        else:
            await self._rewards.close(capture.capture_id, episode_key(place.group, place.episode))
        return await self.require(user, capture_id)

    async def hooks(self, user: str, capture_id: str, place: TurnPlace) -> TurnHooks:
        """For one turn. Raises CaptureNotFound, CaptureClosed, CaptureFull."""
        capture = await self.require(user, capture_id)
        if capture.closed_at is not None:
            raise CaptureClosed(f"capture session {capture_id!r}")
        key = episode_key(place.group, place.episode)
        if key in await self._rewards.closed(capture_id):
            raise CaptureClosed(f"episode {key!r} of capture session {capture_id!r}")
        await self._check_room(capture)
        recorder = CaptureRecorder(self._captures, capture, place, self._end_tokens)
        return TurnHooks(recorder, recorder, await self._sampled(capture))

    async def _check_room(self, capture: Capture) -> None:
        limit = self._config.capture_turns
        if capture.num_turns >= limit:
            raise CaptureFull(
                f"this capture session has {limit} turns (capture_turns); start another one"
            )
        _, num_bytes = await self._captures.usage(capture.user)
        if num_bytes >= self._config.capture_bytes:
            raise CaptureFull(
                f"your capture sessions hold {num_bytes} bytes, of {self._config.capture_bytes} "
                "that the server keeps of each user (capture_bytes); delete some of them"
            )

    async def _sampled(self, capture: Capture) -> str:
        """The name of what is sampled now."""
        model = capture.details.get("model")
        if model is not None:
            return model
        run = capture.details["follow"]
        name = await self._metadata.latest_published(capture.user, run)
        if name is None:
            raise InvalidRequest(
                f"training run {run!r} has published no weights yet; call save_weights_for_sampler"
            )
        return name

    def _end_tokens(self, base_model: str) -> Collection[int]:
        return self._texts.served(base_model).eos_token_ids

    async def expire(self) -> None:
        await self._captures.expire()


def capture_json(capture: Capture, url: str) -> dict[str, Any]:
    """url: of the server, without a slash at its end."""
    base = f"{url}/captures/{capture.capture_id}"
    hidden = ("webhook_secret",)
    details: Mapping[str, Any] = {k: v for k, v in capture.details.items() if k not in hidden}
    expires_at = capture.used_at + capture.ttl_s
    assert math.isfinite(expires_at)
    return {
        "capture_id": capture.capture_id,
        "openai_base_url": f"{base}/oai/api/v1",
        "anthropic_base_url": f"{base}/anthropic",
        **{name: value for name, value in details.items() if value is not None},
        "created_at": capture.created_at,
        "expires_at": expires_at,
        "closed": capture.closed_at is not None,
        "num_turns": capture.num_turns,
        "num_bytes": capture.num_bytes,
    }
