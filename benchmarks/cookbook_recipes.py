"""How long the official cookbook's recipes take here, unmodified, from command to exit.

One server process with SmolLM2-135M-Instruct in float32; the recipes run one after another, each
as the process that its documentation starts. What they check is in tests/e2e; here they are timed.
The baseline is the same command asked for its `--help`: Python, the imports, and no work.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report
from benchmarks.lib.server import our_server
from benchmarks.lib.smollm2 import weights
from tests.e2e.hub import MODEL, build_hub
from tests.e2e.recipes import NEWEST, RECIPES, Recipe, RecipeFailed, cookbooks, run_recipe
from tests.serving import Server
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

LIMIT_S = 1800.0
WELL = "well"
COLUMNS = (
    *("recipe", "steps", "wall s", "imports s (baseline)", "s per step", "load before", "ended"),
)


@dataclass(frozen=True)
class Row:
    recipe: Recipe
    wall_s: float
    imports_s: float
    load: float
    ended: str

    def cells(self) -> tuple[Cell, ...]:
        per_step = (self.wall_s - self.imports_s) / self.recipe.num_steps
        times = (round(self.wall_s, 1), round(self.imports_s, 1), round(per_step, 1))
        return (self.recipe.title, self.recipe.num_steps, *times, round(self.load, 1), self.ended)


def measure(recipe: Recipe, python: str, hub: Path, server: Server) -> Row:
    """One recipe; one that fails has a row too, with the time until it failed."""
    load = os.getloadavg()[0]
    imports_s = import_time(recipe, hub, server, python)
    start = time.perf_counter()
    try:
        run = run_recipe(recipe, hub, server.sdk_environment, LIMIT_S, python)
    except RecipeFailed as failure:
        print(failure, file=sys.stderr)
        wall_s = time.perf_counter() - start
        return Row(recipe, wall_s, imports_s, load, "failed")
    return Row(recipe, run.wall_s, imports_s, load, WELL)


def import_time(recipe: Recipe, hub: Path, server: Server, python: str) -> float:
    """Seconds until the recipe could say how it is called."""
    command = [*recipe.command(hub / "unused", python)[:3], "--help"]
    environment = {**os.environ, **server.sdk_environment}
    start = time.perf_counter()
    process = subprocess.run(command, cwd=hub, env=environment, capture_output=True, check=False)
    seconds = time.perf_counter() - start
    # chz ends with status 1 after its help: its output tells more.
    assert b"model_name" in process.stdout + process.stderr, process.stderr.decode()
    return seconds


def run_all(recipes: Sequence[Recipe], python: str) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root, gguf = Path(scratch), weights()
        tokenizer = ensure_tokenizer_folder(gguf, root / "tokenizers")
        assert tokenizer is not None
        hub = build_hub(root / "hub", tokenizer)
        served = ("--model", f"{MODEL}={gguf}", "--dtype", "float32")
        with our_server(*served) as server:
            for recipe in recipes:
                rows.append(measure(recipe, python, hub, server))
                print(*rows[-1].cells(), sep="\t", flush=True)
    return rows


def main() -> int:
    parser = BenchmarkParser("cookbook_recipes", __doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument(
        "--cookbook", choices=list(cookbooks()), default="0.5.8", help="its version"
    )
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    prepare_process()
    version = options.cookbook
    names = options.recipes or [
        n for n, r in RECIPES.items() if version == NEWEST or not r.newest_only
    ]
    rows = run_all([RECIPES[name] for name in names], cookbooks()[version])
    report = Report(
        title="Stock cookbook recipes",
        about=ABOUT,
        command=parser.command(options),
        columns=COLUMNS,
        rows=[row.cells() for row in rows],
        versions={**versions("tinker", "torch", "transformers"), "tinker-cookbook": version},
    )
    report.publish(options.json)
    return 1 if any(row.ended != WELL for row in rows) else 0


ABOUT = """\
The official `tinker-cookbook` recipes, unmodified, against one server with SmolLM2-135M-Instruct in
float32, each in the small setting of `tests/e2e/recipes.py`, one after another. What these settings
leave are the recipe's defaults: RL trains with `importance_sampling` in 0.5.8 and with
`stable_reinforce` in 0.6.1. Wall time is from
the command to its exit and includes the baseline: the same command asked for its help, which only
imports. Seconds per step are all that is not baseline, sampling and checkpoints too, divided by the
steps. Load is the machine's one-minute load average when the recipe began; it counts the recipe
before it, and other work on the machine."""

if __name__ == "__main__":
    sys.exit(main())
