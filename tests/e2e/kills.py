"""Training runs over kills, compared with the undisturbed ones:
`python -m tests.e2e.kills --seed N --kills 100 --json FILE`.

SFT and RL on SmolLM2, through the official SDK and through tinker_gmi, on a real server with its
defaults. Equal bit for bit must be every log-probability, loss, gradient norm and sample that
the script sees, and the files of every checkpoint that it saved.
"""

import argparse
import json
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from threading import Thread
from types import ModuleType

import tinker

import tinker_gmi
from tests.e2e.clients import MODEL, Client
from tests.e2e.killer import STEP_LIMIT_S, WAIT_STEPS, Kill, Killed, Killer, schedule
from tests.e2e.training_loops import SAVE_EVERY, LoopName, Seen, TrainingLoop
from tests.serving import Server, start_server
from tinkercloud.config import default_data_dir
from tinkercloud.fetch import locate, packaged
from tinkercloud.storage.database_file import DATABASE_NAME

WRONG_BITS = ("gave other bits", "not bit-exact")
RUNS: Sequence[tuple[str, LoopName]] = (
    ("tinker", "sft"),
    ("tinker", "rl"),
    ("tinker_gmi", "sft"),
    ("tinker", "sft"),
    ("tinker", "rl"),
    ("tinker_gmi", "rl"),
)
MOST_KILLS = 9
"""Of a part: each is a test with a limit of ten minutes, which a busy machine must keep too."""


@dataclass(frozen=True)
class Part:
    """A run of the schedule with one SDK and one loop."""

    sdk: str
    number: int
    loop: LoopName
    kills: Sequence[Kill]

    def __str__(self) -> str:
        return f"{self.number}-{self.sdk}-{self.loop}-{len(self.kills)}-kills"

    @property
    def num_steps(self) -> int:
        """So many that no kill comes too late: the loop goes on while one waits for its moment."""
        num_checkpoints = sum(kill.moment == "checkpoint" for kill in self.kills)
        return self.kills[-1].step + 1 + WAIT_STEPS + (SAVE_EVERY - 1) * num_checkpoints


@dataclass(frozen=True)
class Result:
    """differences: places where the run's bits are not those of the undisturbed one, what a log
    says of other bits, and what ended the run, if anything did."""

    sdk: str
    loop: LoopName
    seconds: float
    killed: Sequence[Killed]
    missing: int
    differences: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{self.sdk} {self.loop}: {len(self.killed)} kills ({self.missing} missing) in "
            f"{self.seconds:.0f} s, {len(self.differences)} differences"
        )


def parts(seed: int, num_kills: int) -> list[Part]:
    """The same for the same seed; the loops of one name are equally long, so that they share an
    undisturbed run."""
    num_parts = max(min(len(RUNS), num_kills), -(-num_kills // MOST_KILLS))
    nums = [num_kills * (i + 1) // num_parts - num_kills * i // num_parts for i in range(num_parts)]
    return [
        Part(sdk, i, loop, schedule(1000 * seed + i, num))
        for i, ((sdk, loop), num) in enumerate(zip(cycle(RUNS), nums, strict=False))
    ]


def loop_of(name: LoopName, all_parts: Sequence[Part]) -> TrainingLoop:
    return TrainingLoop(name, max(part.num_steps for part in all_parts if part.loop == name))


def undisturbed(server: Server, loop: TrainingLoop) -> Seen:
    return over_kills(tinker, server, loop, Killer(server, [], loop.num_steps))


def disturbed(
    sdk: ModuleType, server: Server, loop: TrainingLoop, kills: Sequence[Kill], expected: Seen
) -> Result:
    """Raises what ends the loop or the kills, and AssertionError where they do not end."""
    began = time.monotonic()
    killer = Killer(server, kills, loop.num_steps)
    seen = over_kills(sdk, server, loop, killer)
    log = killer.log + server.output()
    differences = seen.differences(expected)
    differences += [line for line in log.splitlines() if any(each in line for each in WRONG_BITS)]
    took_s = time.monotonic() - began
    num_missing = len(kills) - len(killer.killed)
    return Result(sdk.__name__, loop.name, took_s, killer.killed, num_missing, differences)


def over_kills(sdk: ModuleType, server: Server, loop: TrainingLoop, killer: Killer) -> Seen:
    """The loop in a thread: one that hangs must not keep this one; each kill has limits too."""
    seen, failures = Seen(), list[BaseException]()

    def run() -> None:
        try:
            client = Client.connect(sdk, server)
            loop.run(client, seen, killer.begins)
            client.close()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)
        finally:
            killer.begins(loop.num_steps)

    thread = Thread(target=run, name=f"{sdk.__name__} {loop.name}", daemon=True)
    thread.start()
    killer.run()
    step = None
    while thread.is_alive() and killer.step != step:  # a busy machine takes its time, step by step
        step = killer.step
        thread.join(STEP_LIMIT_S)
    if failures:
        came = "\n".join(map(str, killer.killed))
        failures[0].add_note(f"kills:\n{came}\nthe server wrote:\n{killer.log}{server.output()}")
        raise failures[0]
    assert not thread.is_alive(), f"the run hangs; the server wrote:\n{server.output()}"
    for place, path in seen.saved.items():
        folder = checkpoint_folder(server.data_dir, path)
        seen.numbers[f"{place}, checkpoint"] = tensor_digests(folder)
        # What a killed process left beside it would be a second one.
        seen.numbers[f"{place}, folders"] = len(list(folder.parent.iterdir()))
    return seen


def checkpoint_folder(data_dir: Path, path: str) -> Path:
    """path: tinker://MODEL/weights/NAME."""
    model_id, _, name = path.removeprefix("tinker://").split("/")
    query = "SELECT directory FROM checkpoints WHERE model_id = ? AND name = ?"
    with closing(sqlite3.connect(f"file:{data_dir / DATABASE_NAME}?mode=ro", uri=True)) as database:
        (directory,) = database.execute(query, (model_id, name)).fetchone()
    return data_dir / directory


def tensor_digests(folder: Path) -> dict[str, str]:
    """sha256 of each file of tensors."""
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def run_all(seed: int, num_kills: int, weights: Path) -> Iterator[Result]:
    """Part by part, each on a server and a data folder of its own. One that ends early is said, and
    the others go on."""
    all_parts = parts(seed, num_kills)
    expected: dict[LoopName, Seen] = {}
    for part in all_parts:
        loop = loop_of(part.loop, all_parts)
        with tempfile.TemporaryDirectory() as folder:
            if part.loop not in expected:
                with served(weights, Path(folder, "undisturbed")) as server:
                    expected[part.loop] = undisturbed(server, loop)
            with served(weights, Path(folder, "data")) as server:
                try:
                    sdk = sdk_named(part.sdk)
                    result = disturbed(sdk, server, loop, part.kills, expected[part.loop])
                except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the table
                    traceback.print_exception(error)
                    why = [f"it ended: {error!r}"]
                    result = Result(part.sdk, part.loop, 0.0, [], len(part.kills), why)
        yield result


def sdk_named(name: str) -> ModuleType:
    return {"tinker": tinker, "tinker_gmi": tinker_gmi}[name]


def served(weights: Path, data_dir: Path) -> AbstractContextManager[Server]:
    """With its own defaults."""
    return start_server("--model", f"{MODEL}={weights}", data_dir=data_dir)


def table(results: Sequence[Result]) -> str:
    """How many kills came at which moment."""
    counts = Counter(
        (k.moment, k.target, k.signal, k.found) for result in results for k in result.killed
    )
    rows = [f"{num:4}  {'  '.join(key)}" for key, num in sorted(counts.items())]
    return "\n".join([*rows, f"{counts.total():4}  kills"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--json", type=Path, help="where every kill and difference is written")
    options = parser.parse_args(argv)
    weights = locate(packaged("smollm2"), default_data_dir())
    if weights is None:
        parser.error("the SmolLM2 weights are not here; run `make install`")
    results: list[Result] = []
    for result in run_all(options.seed, options.kills, weights):
        results.append(result)
        say(str(result))
        for difference in result.differences[:10]:
            say(f"  {difference}")
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    say(table(results))
    return int(any(each.differences or each.missing for each in results))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
