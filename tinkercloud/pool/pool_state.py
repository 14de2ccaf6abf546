"""What a running pool leaves in its folder: its state for others to read, wishes for it to follow.

The pool's process alone writes the state; commands write wishes. Both are whole files, replaced.
"""

import fcntl
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tinkercloud.errors import ConfigError
from tinkercloud.pool.pool_file import Model

Phase = Literal["starting", "loading", "ready", "refused", "failed", "stopped"]
SETTLED: tuple[Phase, ...] = ("ready", "refused", "failed", "stopped")


@dataclass(slots=True)
class PoolState:
    """text: of a phase in which the model does not run, why, and what to do. plan: a line for each
    device that holds something. drafts: what drafts for the model; "": nothing. devices: label and
    memory of all, in the order of a `tensor_split`. workers: name -> "up" or why not. wish: number
    of the last one taken up."""

    pid: int
    phase: Phase = "starting"
    model: str = ""
    url: str = ""
    text: str = ""
    plan: list[str] = field(default_factory=list)
    drafts: str = ""
    devices: list[tuple[str, int]] = field(default_factory=list)
    workers: dict[str, str] = field(default_factory=dict)
    llama_server_pid: int | None = None
    wish: int = 0


class PoolFolder:
    """Of one pool's file, below the data folder."""

    def __init__(self, data_dir: Path, pool_file: Path):
        place = str(pool_file.absolute())
        digest = hashlib.sha256(place.encode()).hexdigest()[:8]
        self.path = data_dir / "pools" / f"{pool_file.stem}-{digest}"
        self.log = self.path / "pool.log"

    def lock(self) -> int:
        """Held as long as the descriptor is open. Raises ConfigError."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            state = self.read()
            who = "" if state is None else f" (process {state.pid})"
            raise ConfigError(
                f"this pool runs already{who}; `tinkercloud pool stop` ends it"
            ) from None
        return descriptor

    @property
    def is_running(self) -> bool:
        if not self.path.is_dir():
            return False
        try:
            os.close(self.lock())
        except ConfigError:
            return True
        return False

    def read(self) -> PoolState | None:
        """None where no pool was started yet."""
        try:
            return PoolState(**json.loads((self.path / "state.json").read_text()))
        except FileNotFoundError:
            return None

    def write(self, state: PoolState) -> None:
        self._replace("state.json", asdict(state))

    def wish(self, model: Model) -> int:
        """For the pool to serve this model; the number that its state has when it was taken up."""
        number = self.wished()[0] + 1
        self._replace("wish.json", [number, model.model_dump(mode="json")])
        return number

    def wished(self) -> tuple[int, Model | None]:
        try:
            number, model = json.loads((self.path / "wish.json").read_text())
        except FileNotFoundError:
            return 0, None
        return number, Model.model_validate(model)

    def _replace(self, name: str, value: object) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(value))
        os.replace(part, self.path / name)
