"""What one key may have and use at a time."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace

from tinkercloud.config import parse_integer
from tinkercloud.errors import ConfigError

MAX_VALUE = 2**62


@dataclass(frozen=True, slots=True)
class Quota:
    """None: no limit. What counts against it is all that the key's user has, made by whichever key:
    a second key of the user makes no room."""

    models: int | None = None
    """Models in training."""
    memory_bytes: int | None = None
    """Of the adapters, gradients and optimizers of these models."""
    queued: int | None = None
    """Operations and samples that are acknowledged and have not ended."""
    checkpoint_bytes: int | None = None
    tokens_per_minute: int | None = None
    """Trained, of prompts, and sampled."""

    @classmethod
    def decoded(cls, text: str) -> "Quota":
        return cls(**json.loads(text))

    def encoded(self) -> str:
        return json.dumps(self.limits())

    def limits(self) -> dict[str, int]:
        """Those that there are."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def changed(self, settings: Mapping[str, str]) -> "Quota":
        """With limits as the command line has them: a number, or "none". Raises ConfigError."""
        values = {name: _value(name, text) for name, text in settings.items()}
        return replace(self, **values)


QUOTA_NAMES = tuple(item.name for item in fields(Quota))


def _value(name: str, text: str) -> int | None:
    if name not in QUOTA_NAMES:
        raise ConfigError(f"there is no quota {name!r}; there are {', '.join(QUOTA_NAMES)}")
    if text == "none":
        return None
    with suppress(ValueError):
        if (value := parse_integer(text)) <= MAX_VALUE:
            return value
    raise ConfigError(
        f"the quota {name} is a whole number of at least 0, such as 5 or 8GiB, or none; "
        f"not {text!r}"
    )
