"""A JSON file of a model's folder. Without torch: the API process reads it too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkercloud.errors import ConfigError


def read_json(path: Path) -> Mapping[str, Any]:
    """Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content
