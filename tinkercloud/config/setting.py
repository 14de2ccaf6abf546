"""Every setting by its name with dots, and how each source writes it.

Read off the tree. The flag of `engine.threads` is `--engine-threads`, its variable
`TINKERCLOUD_ENGINE_THREADS`, its place in a file `engine: {threads: ...}`. `models` is `--model`
(repeatable) and `TINKERCLOUD_MODEL` (NAME=PATH, separated by commas or lines); `aliases` likewise,
by `--alias` and `TINKERCLOUD_ALIAS`.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud.config.tree import DEFAULT_MODEL_NAME, GIB, KIB, MIB, Config

ENV_PREFIX = "TINKERCLOUD_"
REPEATABLE = {"models": "--model", "aliases": "--alias"}  # settings of many values, by their flags


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree. kind: its type annotation."""

    name: str  # "engine.threads"
    kind: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return REPEATABLE.get(self.name) or "--" + re.sub(r"[._]", "-", self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and the shorter one by which Ray's own tools ask for it."""
        return (self.flag, *(("--ray-address",) if self.name == "cluster.ray_address" else ()))

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def shown_default(self) -> str:
        """The default as one writes it: `2GiB`, `~/.tinkercloud`, `auto` for None."""
        if self.name == "models":
            return DEFAULT_MODEL_NAME.rpartition("/")[2]
        if self.name == "aliases":
            return "none"
        if self.default is None:
            return "auto"
        if self.name.endswith("_bytes"):
            return _as_size(self.default)
        if isinstance(self.default, Path):
            return f"~/{self.default.relative_to(Path.home()).as_posix()}"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def settings() -> dict[str, Setting]:
    """Every setting by name, read off the dataclasses."""
    return {setting.name: setting for setting in _leaves(Config, "")}


def _as_size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def _leaves(tree: type, prefix: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(tree)
    for item in dataclasses.fields(tree):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _leaves(kind, f"{prefix}{item.name}.")
        else:
            yield Setting(prefix + item.name, kind, _default(item), item.metadata["help"])


def _default(item: "dataclasses.Field[Any]") -> Any:
    factory = item.default_factory
    return item.default if factory is dataclasses.MISSING else factory()
