"""Metadata that users give their runs, checkpoints and sessions."""

import json
from collections.abc import Mapping
from typing import Any

from tinkercloud.errors import InvalidField


def check_metadata(user_metadata: Mapping[str, Any] | None) -> None:
    """Raises InvalidField for NaN and infinities, which JSON does not have: no answer could carry
    them back."""
    for name, value in (user_metadata or {}).items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise InvalidField(
                "user_metadata",
                f"user_metadata[{name[:100]!r}] has a number that is not finite (NaN or Infinity), "
                "which JSON does not have; send it as text",
            ) from None


def accepted(user_metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """What is kept of metadata that a client sends. Raises InvalidField."""
    check_metadata(user_metadata)
    return stringified(user_metadata)


def stringified(user_metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Clients send any JSON and expect strings back (wire specification, section 12). Also of what
    was kept before NaN was refused, so that it can still be listed."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (user_metadata or {}).items()
    }
