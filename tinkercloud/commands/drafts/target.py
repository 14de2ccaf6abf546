"""The model that is drafted for, with its prompts: base weights, an adapter or a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tinkercloud.chat.template import ChatTemplate
from tinkercloud.commands.bench import open_target
from tinkercloud.commands.saved_weights import weights_folder, with_weights
from tinkercloud.config import Config
from tinkercloud.embedded.model.device import set_up_torch, usable_cores
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

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
class TargetOptions:
    """prompts: a file with one on each line, or None for a few of every kind. raw: they are the
    beginnings of texts, not what a user says. weights: the folder of an adapter (PEFT's or
    MLX-LM's) or of a checkpoint, or a checkpoint's tinker:// path; None: the base model's."""

    prompts: Path | None = None
    raw: bool = False
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, with the prompts to sample from."""

    version: Version
    prompts: Sequence[Sequence[int]]
    num_threads: int


def open_draft_target(config: Config, options: TargetOptions) -> Target:
    """Of the first model of the settings, ready to sample. Raises ConfigError and UserError."""
    threads = config.engine.threads or usable_cores()
    set_up_torch(threads)
    version, tokenizer = open_target(config)
    if options.weights is not None:
        folder = weights_folder(config.data_dir, options.weights)
        version = with_weights(version.base, folder, config.models[0].path)
    template = None if options.raw else _template(config)
    texts = _prompts(options.prompts)
    prompts = [ids for text in texts if (ids := _encoded(text, template, tokenizer))]
    return Target(version, prompts, threads)


def _encoded(text: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> list[int]:
    if template is None:
        return tokenizer.encode(text).ids
    rendered = template.render([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False).ids


def _template(config: Config) -> ChatTemplate | None:
    """None where the model has none: prompts are then what they are."""
    folder = ensure_tokenizer_folder(config.models[0].path, config.data_dir / "cache")
    return ChatTemplate.of_folder(folder) if folder is not None else None


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts
