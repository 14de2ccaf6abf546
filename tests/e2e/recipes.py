"""The stock `tinker-cookbook` recipes that run here, and how one is run.

A recipe is a process of its own, started by the command that its documentation gives, in a hub
directory (see hub.py), with the server named by the SDK's environment variables alone.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.hub import CONVERSATIONS, LANGUAGES, MODEL, RUBRICS

ROOT = Path(__file__).resolve().parents[2]
NEWEST_VARIABLE = "TINKERCLOUD_TEST_COOKBOOK_PYTHON"
PACKAGE = "tinker_cookbook.recipes"
CHATML = "renderer_name=qwen3_instruct"

# As the recipes' loggers write them, but for the colours: "name:line [LEVEL] text".
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED = re.compile(r"\[(WARNING|ERROR|CRITICAL)\]|Traceback \(most recent call last\)")
# What a recipe says about itself; none of it is about the server.
_EXPECTED = (
    "all advantages zero",
    "Could not fetch model pricing",  # without a network; it logs tokens then, and no costs
    "tinker.lib.sync_only",  # where a recipe waits for a checkpoint inside its event loop
)


@dataclass(frozen=True)
class Recipe:
    """module: below PACKAGE. newest_only: whether the older cookbook takes other arguments, or has
    a fault here."""

    title: str
    module: str
    num_steps: int
    arguments: tuple[str, ...]
    asks_before_overwriting: bool = True
    newest_only: bool = False

    def log_dir(self, hub: Path) -> Path:
        return hub / "runs" / self.title.replace(" ", "-")

    def command(self, log_dir: Path, python: str = sys.executable) -> list[str]:
        named = [f"model_name={MODEL}", f"log_path={log_dir}", f"max_steps={self.num_steps}"]
        if self.asks_before_overwriting:
            named.append("behavior_if_log_dir_exists=raise")
        return [python, "-m", f"{PACKAGE}.{self.module}", *named, *self.arguments]


_GROUPS = ("groups_per_batch=2", "lora_rank=8", "eval_every=0", "save_every=0")

RECIPES = {
    "arithmetic_rl": Recipe(
        "arithmetic RL",
        "math_rl.train",
        3,
        ("env=arithmetic", "groups_per_batch=2", "group_size=4", "max_tokens=5", "lora_rank=8",
         "eval_every=0", "save_every=0"),
    ),
    "sl_loop": Recipe(
        "supervised loop",
        "sl_loop",
        3,
        ("lora_rank=8", "batch_size=4", "max_length=64", "save_every=0"),
        asks_before_overwriting=False,
    ),
    "rl_loop": Recipe(
        "RL loop",
        "rl_loop",
        2,
        ("lora_rank=8", "batch_size=1", "group_size=8", "max_tokens=8", "save_every=0"),
        asks_before_overwriting=False,
    ),
    "chat_sft": Recipe(
        "chat SFT",
        "chat_sl.train",
        3,
        (f"dataset={CONVERSATIONS}", "lora_rank=8", "batch_size=4", "max_length=64",
         "save_every=2", "eval_every=0"),
    ),
    "prompt_distillation": Recipe(
        "prompt distillation",
        "prompt_distillation.train",
        2,
        (f"file_path={LANGUAGES}", "lora_rank=8", "batch_size=4", "max_length=64",
         "save_every=0", "eval_every=0"),
    ),
    "dpo": Recipe(
        "DPO",
        "preference.dpo.train",
        2,
        ("dataset=hhh", "batch_size=2", "max_length=64", "learning_rate=1e-4"),
    ),
    "on_policy_distillation": Recipe(
        "on-policy distillation",
        "distillation.on_policy_distillation",
        2,
        (f"teacher_model={MODEL}", "dataset=deepmath", "groups_per_batch=2", "group_size=2",
         "max_tokens=8", "lora_rank=8", "eval_every=0", "save_every=0"),
    ),
    "guess_number": Recipe(
        "multi-turn RL: guess the number",
        "multiplayer_rl.guess_number.train",
        1,
        (CHATML, "batch_size=1", "group_size=2", "max_tokens=8", "eval_every=0", "save_every=0"),
    ),
    "shorter": Recipe(
        "preference RL: shorter",
        "preference.shorter.train",
        1,
        (CHATML, "batch_size=1", "group_size=4", "max_tokens=8", "eval_every=0"),
    ),
    "async_rl": Recipe(
        "async RL: arithmetic",
        "math_rl.train",
        3,
        ("env=arithmetic", "group_size=4", "max_tokens=5", "max_steps_off_policy=2", *_GROUPS),
    ),
    "rl_numerics_check": Recipe(
        "RL numerics check",
        "rl_numerics_check.train",
        2,
        (CHATML, "group_size=2", "groups_per_batch=1", "max_tokens=32", "lora_rank=8",
         "task.num_pages_min=2", "task.num_pages_max=2", "task.page_chars=250",
         "learning_rate=1e-4", "save_every=0", "behavior_if_log_dir_exists=resume"),
        asks_before_overwriting=False,
        newest_only=True,  # of 0.5.8 threads share a tokenizer that they change
    ),
    "rubric": Recipe(
        "RL with a rubric",
        "rubric.train",
        1,
        (CHATML, f"grader_llm_name={MODEL}", "grader_renderer_name=qwen3_instruct",
         f"train_jsonl_path={RUBRICS}", f"test_jsonl_path={RUBRICS}", "train_group_size=4",
         "max_tokens=8", "groups_per_batch=1", "lora_rank=8", "eval_every=0", "save_every=0"),
        newest_only=True,
    ),
}  # fmt: skip

NEWEST = "0.6.1"
"""Of the cookbook; its RL recipes use stable_reinforce by default, which 0.5.8 does not have."""


def cookbooks() -> dict[str, str]:
    """The interpreters that have a cookbook, by its version. The newest has an environment of its
    own (`make test-all` makes it), whose packages lie over those of ours."""
    newest = ROOT / ".venv-cookbook/bin/python"
    return {"0.5.8": sys.executable, NEWEST: os.environ.get(NEWEST_VARIABLE, str(newest))}


@dataclass(frozen=True)
class Run:
    """What a recipe that ended well left behind. metrics: one dict for each step. checkpoints: one
    for each line. config: its settings, defaults and all."""

    recipe: Recipe
    output: str
    wall_s: float
    metrics: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]
    config: dict[str, Any]

    @property
    def complaints(self) -> list[str]:
        """Lines that warn of something, but for what is expected."""
        plain = _COLOUR.sub("", self.output)
        lines = [line for line in plain.splitlines() if _LOGGED.search(line)]
        return [line for line in lines if not any(text in line for text in _EXPECTED)]


class RecipeFailed(AssertionError):
    """The text ends with what the recipe wrote."""


def run_recipe(
    recipe: Recipe,
    hub: Path,
    environment: Mapping[str, str],
    limit_s: float,
    python: str = sys.executable,
) -> Run:
    """Run it to its end; RecipeFailed when it fails or takes longer than `limit_s`.

    environment: what a client of the server needs. python: the interpreter that has the cookbook.
    The recipe logs below `hub`, once.
    """
    log_dir = recipe.log_dir(hub)
    output = log_dir.with_suffix(".log")
    output.parent.mkdir(exist_ok=True, parents=True)
    began = time.perf_counter()
    with output.open("wb") as log:
        try:
            status = subprocess.run(
                recipe.command(log_dir, python),
                cwd=hub, env=_environment(hub, environment), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = f"none within {limit_s:.0f} s"
    wall_s = time.perf_counter() - began
    text = output.read_text(encoding="utf-8", errors="replace")
    if status != 0:
        raise RecipeFailed(f"{recipe.module}: exit status {status}; it wrote:\n{text[-8000:]}")
    checkpoints = read_lines(log_dir / "checkpoints.jsonl")
    metrics = [row for row in read_lines(log_dir / "metrics.jsonl") if not _is_closing(row)]
    config = json.loads((log_dir / "config.json").read_text(encoding="utf-8"))
    return Run(recipe, text, wall_s, metrics, checkpoints, config)


def _is_closing(row: Mapping[str, Any]) -> bool:
    """Whether it is the line after the last step that the newest cookbook adds: tokens in all."""
    return all(name == "step" or name.startswith("tokens/") for name in row)


def _environment(hub: Path, client: Mapping[str, str]) -> dict[str, str]:
    """The client's variables over ours; caches stay in the hub, so that nothing is found twice."""
    private = {"HF_HOME": str(hub / ".cache"), "TINKER_COOKBOOK_RUNS_DIR": str(hub / "runs")}
    return {**os.environ, **private, "PYTHONUNBUFFERED": "1", **client}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
