"""How a recipe of our own cookbook/ is run as a command, and what it left is read."""

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.serving import ROOT, Server

LIMIT_S = 300.0
SDKS = ["tinker_gmi", "tinker"]

# A recipe is a process of its own, forked from one that has imported what all of them import:
# these take ten seconds of a core, and there are twenty recipes to run.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["matplotlib.pyplot", "tinker", "tinker_gmi", "transformers.models.auto.tokenization_auto"]
)


def recipe(server: Server, name: str, *arguments: str, ok: bool = True) -> str:
    """What `cookbook/NAME.py` printed; it must succeed, or fail when not ok."""
    script = ROOT / "cookbook" / f"{name}.py"
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        command = [str(script), *arguments]
        run = _PROCESSES.Process(
            target=_run, args=(command, server.sdk_environment, output, errors)
        )
        run.start()
        run.join(LIMIT_S)
        run.kill()  # if it is still there
        run.join()
        assert (run.exitcode == 0) == ok, output.read_text() + errors.read_text()
        return (output if ok else errors).read_text()


def _run(command: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    """As the interpreter runs a command."""
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, path in enumerate((output, errors), 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def figures(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / f"{name}.json").read_text())


def steps_of(folder: Path, name: str) -> list[dict[str, float]]:
    """The lines of a run's metrics, those of saved weights and of the beginning left out."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [line for line in lines if not {"state", "before"} & line.keys()]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
