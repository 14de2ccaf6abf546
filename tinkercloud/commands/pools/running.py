"""`tinkercloud pool start | stop | status | logs | swap`."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tinkercloud import logs
from tinkercloud.commands.options import Arguments, config_of, say
from tinkercloud.errors import ConfigError
from tinkercloud.pool.child_process import log_end
from tinkercloud.pool.pool_file import Model, load_pool
from tinkercloud.pool.pool_state import SETTLED, PoolFolder, PoolState
from tinkercloud.pool.supervisor import Supervisor

STOP_S = 30.0
_POLL_S = 0.2


def folder_of(arguments: Arguments) -> PoolFolder:
    return PoolFolder(config_of(arguments).data_dir, arguments["file"])


def start(arguments: Arguments) -> int:
    """1 where the model does not run in the end. Raises ConfigError."""
    pool = load_pool(arguments["file"])
    model = pool.model(arguments["model"])
    folder = folder_of(arguments)
    if arguments["foreground"]:
        config = config_of(arguments)
        logs.configure(config.log_level, config.log_format)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a question each second
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        lock = folder.lock()
        try:
            Supervisor(pool, model, folder).run(ended)
        finally:
            os.close(lock)
        return 0
    if folder.is_running:
        raise ConfigError("this pool runs already; `tinkercloud pool stop` ends it")
    (folder.path / "state.json").unlink(missing_ok=True)
    process = _detached(arguments, model.name, folder)
    say(f"starting {model.name}; log: {folder.log}")
    state = _followed(folder, lambda state: True, lambda: process.poll() is not None, say)
    if state is None or (process.poll() is not None and state.phase not in ("stopped", "failed")):
        raise ConfigError(f"the pool ended: {log_end(folder.log, 3)}")
    return _show(state)


def stop(arguments: Arguments) -> int:
    folder = folder_of(arguments)
    state = folder.read()
    if state is None or not folder.is_running:
        say("the pool does not run")
        return 0
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while folder.is_running:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"process {state.pid} did not end within {STOP_S:.0f} s; its log is {folder.log}"
            )
        time.sleep(_POLL_S)
    say("stopped")
    return 0


def status(arguments: Arguments) -> int:
    """1 where no model is ready."""
    folder = folder_of(arguments)
    state = folder.read()
    if state is None or not folder.is_running:
        say("the pool does not run; `tinkercloud pool start` starts it")
        return 1
    return _show(state)


def swap(arguments: Arguments) -> int:
    """1 where the model does not run in the end. Raises ConfigError."""
    model = load_pool(arguments["file"]).model(arguments["model"])
    folder = folder_of(arguments)
    if not folder.is_running:
        raise ConfigError(f"the pool does not run; `tinkercloud pool start {model.name}` starts it")
    return _show(swapped(folder, model, say))


def swapped(folder: PoolFolder, model: Model, report: Callable[[str], None]) -> PoolState:
    """The settled state. report: gets lines of the log meanwhile. Raises ConfigError."""
    number = folder.wish(model)
    state = _followed(
        folder, lambda state: state.wish >= number, lambda: not folder.is_running, report
    )
    if state is None or state.wish < number:
        raise ConfigError(f"the pool ended: {log_end(folder.log, 3)}")
    return state


def show_logs(arguments: Arguments) -> int:
    """Raises ConfigError, with the names that there are."""
    folder = folder_of(arguments)
    there = sorted(path.stem for path in folder.path.glob("*.log"))
    name = arguments["name"]
    if name is not None and name not in there:
        names = ", ".join(there) or "none yet"
        raise ConfigError(f"no log {name!r} in {folder.path}; there is: {names}")
    for each in [name] if name is not None else there:
        say(f"== {folder.path / each}.log")
        say(log_end(folder.path / f"{each}.log", arguments["lines"]))
    return 0


def _detached(arguments: Arguments, model: str, folder: PoolFolder) -> "subprocess.Popen[bytes]":
    """It goes on when this command and its terminal have ended."""
    command = [sys.executable, "-m", "tinkercloud", "pool", "start", model, "--foreground"]
    command += ["--file", str(arguments["file"].absolute())]
    command += ["--data-dir", str(config_of(arguments).data_dir)]
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _followed(
    folder: PoolFolder,
    is_meant: Callable[[PoolState], bool],
    has_ended: Callable[[], bool],
    report: Callable[[str], None],
) -> PoolState | None:
    """The state once it is settled, or the last one where the pool has ended; what its log says
    meanwhile is reported."""
    position = folder.log.stat().st_size if folder.log.is_file() else 0
    while True:
        over = has_ended()
        position = _show_log(folder.log, position, report)
        state = folder.read()
        if over or (state is not None and is_meant(state) and state.phase in SETTLED):
            return state
        time.sleep(_POLL_S)


def _show_log(log: Path, position: int, report: Callable[[str], None]) -> int:
    if not log.is_file():
        return 0
    with log.open("rb") as file:
        file.seek(position)
        while (line := file.readline()).endswith(b"\n"):
            report(line.decode("utf-8", errors="replace").rstrip())
            position = file.tell()
    return position


def _show(state: PoolState) -> int:
    say(f"{state.model}: {state.phase}" + (f" at {state.url}" if state.phase == "ready" else ""))
    if state.text:
        say(state.text)
    for line in state.plan:
        say(f"  {line}")
    if state.drafts:
        say(f"  drafts: {state.drafts}")
    for name, health in state.workers.items():
        say(f"  worker {name}: {health}")
    return 0 if state.phase == "ready" else 1
