"""What `tinkercloud draft` does: list a model's drafts, make and teach one, choose between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tinkercloud.commands.bench_command import base_of
from tinkercloud.commands.draft_collect import (
    CollectConfig,
    FinetuneConfig,
    Target,
    collected,
    evaluated,
    finetuned,
)
from tinkercloud.commands.draft_distill import DistillConfig, Say, distilled, sample_texts
from tinkercloud.config import Config
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.online_trainer import CASES
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.model.device import usable_cores
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError, NotFound
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import ALIASES, DraftFolder
from tinkercloud.speculative.observability.acceptance_log import (
    AcceptanceTracker,
    read_moments,
    tracker_of,
)
from tinkercloud.speculative.observability.acceptance_plot import draw

CASE_BYTES, MOST_AGE = 64 * 1024**2, 10**6

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
class TrainOptions:
    """prompts: a file with one on each line, or None for a few of every kind. anew: from the
    model's own samples though there is a head, and cases that it may learn from."""

    prompts: Path | None
    distillation: DistillConfig
    anew: bool = False


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """export: a file for the cases, beside the drafts' own."""

    prompts: Path | None
    sampling: CollectConfig
    export: Path | None = None


def folder_of(config: Config) -> DraftFolder:
    return drafts_of(config.data_dir / "drafts", config.models[0].name)


def status(config: Config, plot: Path | None = None) -> list[str]:
    """What is drafted with (a line for the best draft, one for the latest where it is another),
    what they learn from, how often their tokens stood; a picture to `plot`. Raises UserError where
    there is nothing to draw."""
    folder = folder_of(config)
    best = _named(folder, "best")
    lines = [f"drafting with: {best or 'no draft yet; `tinkercloud draft train` makes one'}"]
    named = [version for alias in ALIASES if (version := _named(folder, alias)) is not None]
    lines += [_line(folder, version) for version in dict.fromkeys(named)]
    store = store_of(folder)
    lines.append(
        f"collected: {len(store.disagreed)} disagreements, {len(store.agreed)} agreed cases"
    )
    moments = read_moments(folder.root)
    lines += _acceptance(tracker_of(moments))
    if plot is not None:
        draw(moments, plot, f"Drafts for {config.models[0].name}")
        lines.append(f"drawn: {plot}")
    return lines


def _acceptance(tracker: AcceptanceTracker) -> list[str]:
    told = tracker.as_json()
    if told["rate"] is None:
        return ["no draft was verified yet"]
    windows = ", ".join(f"last {n}: {rate:.0%}" for n, rate in told["windows"].items() if rate)
    spread = ", ".join(f"p{q} {share:.0%}" for q, share in told["percentiles"].items())
    lines = [
        f"stood: {told['rate']:.0%} of drafted tokens ({windows}; {spread}; "
        f"{told['trend_per_step']:+.2%} a step)"
    ]
    for name, own in told["categories"].items():
        lines.append(f"  {name or 'base model'}: {own['rate']:.0%}")
    return lines


def store_of(folder: DraftFolder) -> CaseStore:
    """The cases that were collected last."""
    store = CaseStore(CASE_BYTES, MOST_AGE)
    path = folder.root / CASES
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            store.read(lines)
    return store


def listed(config: Config) -> list[str]:
    """A line for each draft, the newest last; or that there is none."""
    folder, model = folder_of(config), config.models[0].name
    lines = [_line(folder, version) for version in folder.versions()]
    return lines or [f"{model} has no draft yet; `tinkercloud draft train` makes one"]


def _line(folder: DraftFolder, version: str) -> str:
    """Of one draft: the aliases that name it, what is expected to stand, why it was made."""
    notes = folder.notes(version)
    called = " ".join(alias for alias in ALIASES if _named(folder, alias) == version)
    after = notes.get("after", {})
    stands = ""
    if after:
        stands = f"{after['mean']:.2f} tokens of a draft stand ({_depths(after['by_depth'])})"
    return f"{version}  {called:12}  {stands}  {notes.get('reason', '')}".rstrip()


def _target(config: Config, prompts: Path | None) -> Target:
    """The model of the settings, ready to write."""
    threads = config.engine.threads or usable_cores()
    torch.set_num_threads(threads)
    base = base_of(config)
    if base.decoder is None:
        raise ConfigError(f"{base.name} has no tokenizer; its drafts are made from texts")
    decoder, texts = base.decoder, _prompts(prompts)
    tokens = [ids for text in texts if (ids := decoder.encode(text).ids)]
    return Target(Version("draft target", base, base.weights, None, 1.0), tokens, threads)


def train(config: Config, options: TrainOptions, say: Say) -> str:
    """Teaches the best head by the collected cases, where there are both; else distils one. The
    version that it wrote."""
    folder = folder_of(config)
    store = store_of(folder)
    target = _target(config, options.prompts)
    if options.anew or _named(folder, "best") is None or not len(store):
        return _distil(target, options, folder, say)
    head = open_head(folder, "best", target.version.base)
    finetune_config = FinetuneConfig(folder, options.distillation.minutes)
    outcome = finetuned(target.version, head, store, finetune_config, say)
    say(
        f"{outcome.version}: {outcome.before.mean:.2f} tokens of a draft stood before, "
        f"{outcome.after.mean:.2f} now; {'it is the best' if outcome.promoted else 'not used'}"
    )
    return outcome.version


def _distil(target: Target, options: TrainOptions, folder: DraftFolder, say: Say) -> str:
    asked, name = options.distillation, target.version.base.name
    say(f"{name} writes {asked.samples} samples of {len(target.prompts)} prompts")
    samples = sample_texts(target.version, target.prompts, asked, target.num_threads)
    notes = distilled(target.version, samples, asked, folder, say)
    before, after = notes["before"]["mean"], notes["after"]["mean"]
    say(f"{notes['version']}: {before:.2f} tokens of a draft stood before, {after:.2f} now")
    return notes["version"]


def collect(config: Config, options: CollectOptions, say: Say) -> int:
    """Samples with the best head beside them; how many cases there are now, in the folder and in
    `options.export`. Raises ConfigError without a head."""
    folder = folder_of(config)
    target = _target(config, options.prompts)
    drafter = HeadDrafter(*open_head(folder, "best", target.version.base))
    store = store_of(folder)
    before = len(store)
    seen = collected(target, drafter, options.sampling, store)
    for path in (folder.root / CASES, *([options.export] if options.export else [])):
        store.write(path)
    say(
        f"{seen.num_tokens} tokens, {_depths(seen.by_depth)} of drafted ones stood; "
        f"{len(store) - before} cases more, {len(store)} in all"
    )
    return len(store)


def evaluate(config: Config, names: Sequence[str], options: CollectOptions, say: Say) -> None:
    """Of each head, on the same samples: tokens of a draft that are expected to stand, and those
    that did."""
    folder = folder_of(config)
    target = _target(config, options.prompts)
    sampling = options.sampling
    texts = sample_texts(target.version, target.prompts, sampling, target.num_threads)
    for name in names or [_named(folder, "best") or "best"]:
        head = open_head(folder, name, target.version.base)
        expected = evaluated(target.version, head, texts)
        store = CaseStore(CASE_BYTES, MOST_AGE)
        seen = collected(target, HeadDrafter(*head), sampling, store)
        say(
            f"{folder.resolve(name)}: {expected.mean:.2f} tokens of a draft expected to stand "
            f"({_depths(expected.by_depth)}); in the engine {_depths(seen.by_depth)} stood, "
            f"{seen.per_pass:.2f} tokens a pass"
        )


def _depths(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


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
