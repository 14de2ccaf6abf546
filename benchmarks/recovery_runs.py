"""A run that was trained by the official client: computed again, and branched from one of its
steps."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.report import Cell, Target
from benchmarks.lib.server import sdk_for
from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.serving import QUIET, Server, start_server

COLUMNS = ("what", "steps", "seconds", "result")
NUM_STEPS, TOKENS = 16, 64
ABOUT = """\
A model (LoRA of rank 8) is trained by the official SDK on a server with its defaults, a datum of 64
tokens a step. Then, beside the server, its run is computed again (`tinkercloud replay`), from the
nearest snapshot too, and branched (`tinkercloud branch`) from its middle: a new model is made of
the checkpoint, and takes the steps that the first one took from there. *seconds* of commands: with
the start of an engine of their own."""


@dataclass(frozen=True)
class Run:
    """steps: the numbers that its client saw."""

    model: Any
    steps: Sequence[Sequence[Any]]
    seconds: float


def measure(weights: Path, num_steps: int = NUM_STEPS) -> tuple[list[Sequence[Cell]], list[Target]]:
    middle = num_steps // 2
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server("--model", f"{MODEL}={weights}", data_dir=Path(folder) / "data") as server,
    ):
        client = Client.connect(sdk_for(server), server)
        first = trained(client, client.model(), range(num_steps))
        run_id = first.model.model_id
        again_s, again = command(server, weights, "replay", run_id)
        nearest = ("replay", run_id, "--step", str(num_steps), "--nearest")
        nearest_s, from_nearest = command(server, weights, *nearest)
        branch_s, path = command(server, weights, "branch", run_id, "--step", str(middle))
        model = client.service.create_training_client_from_state_with_optimizer(path).result()
        branch = trained(client, model, range(middle, num_steps))
        client.close()
    num_other = sum(x != y for x, y in zip(branch.steps, first.steps[middle:], strict=True))
    rows: list[Sequence[Cell]] = [
        ("trained", num_steps, round(first.seconds, 1), "-"),
        ("replay", num_steps, round(again_s, 1), again),
        (f"replay of step {num_steps}, nearest", "-", round(nearest_s, 1), from_nearest),
        (f"branch from step {middle}", "-", round(branch_s, 1), "a checkpoint"),
        (
            *("the branch trained", num_steps - middle, round(branch.seconds, 1)),
            f"{num_other} steps gave other bits",
        ),
    ]
    same = sum(text.startswith("all ") for text in (again, from_nearest))
    return rows, [
        Target.at_least("replays with the bits on record", same, 2),
        Target.at_most("steps of the branch with other bits", num_other, 0),
    ]


def trained(client: Client, model: Any, numbers: Sequence[int]) -> Run:
    began = time.perf_counter()
    return Run(model, [step(client, model, n) for n in numbers], time.perf_counter() - began)


def step(client: Client, model: Any, number: int) -> Sequence[Any]:
    tokens = [(7 * i * i + 13 * number) % 40_000 for i in range(TOKENS + 1)]
    passed = model.forward_backward([client.supervised(tokens)], "cross_entropy")
    stepped = model.optim_step(client.adam())
    norm = stepped.result().metrics["unclipped_grad_l2:mean"]
    return [*logprobs_of(passed.result()).tolist(), norm]


def command(server: Server, weights: Path, *arguments: str) -> tuple[float, str]:
    """Seconds, and the last line that it said."""
    place = ("--data-dir", str(server.data_dir), "--model", f"{MODEL}={weights}")
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tinkercloud", *arguments, *place],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **QUIET},
        check=True,
    )
    return time.perf_counter() - began, done.stdout.strip().splitlines()[-1]
