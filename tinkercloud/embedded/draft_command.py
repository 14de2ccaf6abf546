"""What `tinkercloud draft` does: list a model's drafts, make one, choose between them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tinkercloud.config import Config
from tinkercloud.embedded.bench_command import base_of
from tinkercloud.embedded.device import usable_cores
from tinkercloud.embedded.distill import Distillation, distilled, written
from tinkercloud.embedded.draft_files import drafts_of
from tinkercloud.embedded.versions import Version
from tinkercloud.errors import ConfigError, NotFound
from tinkercloud.speculative.draft_folder import ALIASES, DraftFolder

PROMPTS = (
    "The old harbour was quiet that morning, and nobody expected",
    "To make a simple soup for four people, first",
    "Dear customer, thank you for your order. We",
    "In mathematics, a prime number is",
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "SELECT name, price FROM",
    '{"users": [{"name": "',
    "Question: What is the capital of Italy?\nAnswer:",
    "Question: If a train travels 60 miles in 2 hours, how fast is it?\nAnswer: Let us",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "The history of the printing press begins",
    "Water boils when",
    "Here are five tips for learning a language:\n1.",
    "Once upon a time, in a small village,",
    "The main difference between cats and dogs is",
    "Abstract: In this paper we",
    "The weather forecast for tomorrow:",
    "Step 1: Open the box. Step 2:",
    "She looked at the letter again and",
    "The function returns an error if",
    "Photosynthesis is the process by which",
    "# Installation\n\nTo install the package, run",
    "A good teacher should",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """prompts: a file with one on each line, or None for a few of every kind."""

    prompts: Path | None
    distillation: Distillation


def folder_of(config: Config) -> DraftFolder:
    return drafts_of(config.data_dir / "drafts", config.models[0].name)


def status(config: Config) -> list[str]:
    """A line for each draft, the newest last; or that there is none."""
    folder = folder_of(config)
    aliases = {alias: _named(folder, alias) for alias in ALIASES}
    lines = []
    for name in folder.versions():
        notes = folder.notes(name)
        called = " ".join(alias for alias, version in aliases.items() if version == name)
        after = notes.get("after", {})
        depths = " ".join(f"{share:.0%}" for share in after.get("by_depth", ()))
        stands = f"{after['mean']:.2f} tokens of a draft stand ({depths})" if after else ""
        lines.append(f"{name}  {called:12}  {stands}  {notes.get('reason', '')}".rstrip())
    model = config.models[0].name
    return lines or [f"{model} has no draft yet; `tinkercloud draft train` makes one"]


def train(config: Config, wanted: Wanted, say: Callable[[str], None]) -> str:
    """Distils a head; its version."""
    threads = config.engine.threads or usable_cores()
    torch.set_num_threads(threads)
    base = base_of(config)
    if base.decoder is None:
        raise ConfigError(f"{base.name} has no tokenizer; its drafts are made from texts")
    version = Version("draft target", base, base.weights, None, 1.0)
    texts = _prompts(wanted.prompts)
    prompts = [ids for text in texts if (ids := base.decoder.encode(text).ids)]
    say(f"{base.name} writes {wanted.distillation.samples} samples of {len(prompts)} prompts")
    samples = written(version, prompts, wanted.distillation, threads)
    notes = distilled(version, samples, wanted.distillation, folder_of(config), say)
    before, after = notes["before"]["mean"], notes["after"]["mean"]
    say(f"{notes['version']}: {before:.2f} tokens of a draft stood before, {after:.2f} now")
    return notes["version"]


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts: {error}") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no prompts")
    return found


def _named(folder: DraftFolder, alias: str) -> str | None:
    try:
        return folder.resolve(alias)
    except NotFound:
        return None
