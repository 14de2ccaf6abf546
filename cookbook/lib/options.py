"""The options that all recipes have."""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import httpx

from lib.run import Run, leave


class RecipeError(Exception):
    """Its text is what the user reads."""


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BASE_URL = "http://127.0.0.1:8700"
REACHED_S = 30.0


def parser(description: str) -> argparse.ArgumentParser:
    """What every recipe has; what is particular to one it adds itself."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--sdk",
        type=_sdk,
        default="tinker_gmi",
        metavar="{tinker_gmi,tinker}",
        help="the client: this project's or the official one",
    )
    parser.add_argument(
        "--base-url",
        type=lambda url: url.rstrip("/"),
        default=os.environ.get("TINKER_BASE_URL", BASE_URL),
        help="the server; else TINKER_BASE_URL",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("TINKER_API_KEY"),
        help="its key; else TINKER_API_KEY",
    )
    parser.add_argument("--seed", type=int, default=0, help="of batches and samples")
    parser.add_argument("--held-out", type=int, default=32, help="problems asked before and after")
    parser.add_argument(
        "--out", type=Path, help="folder for the figures (JSON) and a picture (PNG)"
    )
    return parser


def add_model(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--model", default=MODEL, help="base model, as the server names it")


def add_adapter(arguments: argparse.ArgumentParser, rank: int = 16) -> None:
    """For recipes that begin with a new one."""
    add_model(arguments)
    arguments.add_argument("--rank", type=int, default=rank, help="of the LoRA adapter")


def add_state(arguments: argparse.ArgumentParser) -> None:
    """For recipes that go on from what another one left."""
    arguments.add_argument(
        "state", help="the weights to start from, tinker://..., printed by sft.py"
    )


def add_steps(
    arguments: argparse.ArgumentParser, steps: int, learning_rate: float, save_every: int
) -> None:
    arguments.add_argument("--steps", type=int, default=steps)
    arguments.add_argument("--learning-rate", type=float, default=learning_rate)
    arguments.add_argument(
        "--save-every", type=int, default=save_every, help="steps, to go on from"
    )


def sampling_client(service: Any, **of: str) -> Any:
    """of: base_model or model_path. The official client makes one at once, ours in a future."""
    made = service.create_sampling_client(**of)
    return made.result() if hasattr(made, "result") else made


def main(
    recipe: Callable[[argparse.Namespace], Run | None], parser: argparse.ArgumentParser
) -> None:
    """Run a recipe as a command: figures and picture into --out, failures as one line. One that
    returns no `Run` leaves its own."""
    args = parser.parse_args()
    if args.api_key is None:
        parser.error("give --api-key or set TINKER_API_KEY; `tinkercloud serve` prints both")
    if args.out is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out draws a picture: pip install 'tinkercloud[plot]', or leave it out")
    try:
        if args.out is not None:
            _make_writable(args.out)  # before it trains
        if args.base_url is not None:
            _reach(args.base_url)
        run = recipe(args)
    except (args.sdk.TinkerError, OSError, RecipeError) as error:
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if run is not None:
        leave(args.out, run.name, asdict(run), lambda plot, path: plot.draw(path, [run]))


def end_without(package: ModuleNotFoundError) -> NoReturn:
    """As a recipe is imported that needs more than the client."""
    sys.exit(f"{Path(sys.argv[0]).name}: {_missing(package)}")


def _missing(package: ModuleNotFoundError) -> str:
    name = (package.name or "").partition(".")[0]
    return f"this needs {name}, which is not installed: pip install {name}"


def _make_writable(folder: Path) -> None:
    """Raises RecipeError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise RecipeError(f"--out: {folder} cannot be written")


def _reach(server: str) -> None:
    """Clients wait for minutes for one that does not answer, as it may be starting anew; one that
    is not there as a recipe begins was never started. Raises RecipeError."""
    try:
        httpx.get(f"{server}/api/v1/healthz", timeout=REACHED_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RecipeError(
            f"no server answers at {server} ({error}): `tinkercloud serve` starts one, and prints "
            "TINKER_BASE_URL"
        ) from error


def _sdk(name: str) -> ModuleType:
    if name not in ("tinker_gmi", "tinker"):
        raise argparse.ArgumentTypeError(f"{name!r} is not tinker_gmi or tinker")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as package:
        raise argparse.ArgumentTypeError(_missing(package)) from package
