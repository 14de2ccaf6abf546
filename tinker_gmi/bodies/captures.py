"""Bodies about capture sessions."""

from typing import Any

from pydantic import Field

from tinker_gmi.bodies.wire_model import WireModel

LABEL = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of groups and episodes: parts of an agent's base URL."""
MAX_NAME_CHARACTERS = 4096


class CreateCaptureRequest(WireModel):
    """model: what is sampled, by any name of the OpenAI routes. follow: a training run instead,
    whose latest published weights are sampled. group: of trajectories that name none. webhook: a
    URL that is asked for rewards, `idle_s` after an episode's last turn."""

    model: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    follow: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    group: str | None = Field(None, pattern=LABEL)
    metadata: dict[str, Any] = Field(default_factory=dict)
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    webhook: str | None = Field(None, min_length=1, max_length=2048)
    idle_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class ChangeCaptureRequest(WireModel):
    """Other weights from the next turn on."""

    model: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    follow: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARACTERS)


class CaptureRewardRequest(WireModel):
    """Of one of trajectory, turn and episode (with its group), or of the whole session. key: the
    same one again replaces the reward, rewards of different keys are added."""

    value: float = Field(allow_inf_nan=False)
    trajectory: str | None = Field(None, max_length=256)
    turn: str | None = Field(None, max_length=256)
    episode: str | None = Field(None, pattern=LABEL)
    group: str | None = Field(None, pattern=LABEL)
    key: str = Field("", max_length=128)


class CloseCaptureRequest(WireModel):
    """One episode (with its group), or the whole session."""

    episode: str | None = Field(None, pattern=LABEL)
    group: str | None = Field(None, pattern=LABEL)
