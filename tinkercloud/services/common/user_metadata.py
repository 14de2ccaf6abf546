"""Metadata that users give their runs, checkpoints and sessions."""

import json
from collections.abc import Mapping
from typing import Any


def stringified(user_metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Clients send any JSON and expect strings back (wire specification, section 12)."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (user_metadata or {}).items()
    }
