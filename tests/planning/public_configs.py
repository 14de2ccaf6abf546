"""The figures of public networks, as their config.json files have them."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
REFUSED = ("gemma-3-1b", "gemma-3-27b-it", "gpt-oss-20b")
TRAINABLE = [name for name in NAMES if name not in REFUSED]


def public_config(name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return config | changes
