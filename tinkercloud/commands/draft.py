"""What `tinkercloud draft` does: list a model's drafts, train and compare them, choose one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.commands.bench import open_target, percentages
from tinkercloud.commands.draft_collect import CollectConfig, Target, collected, sample_texts
from tinkercloud.commands.draft_train import (
    DistillConfig,
    FinetuneConfig,
    Say,
    distilled,
    evaluated,
    finetuned,
)
from tinkercloud.config import Config
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.online_trainer import CASES
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.model.device import set_up_torch, usable_cores
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import ALIASES, DraftFolder
from tinkercloud.speculative.observability.acceptance_log import (
    AcceptanceTracker,
    read_moments,
    tracker_of,
)
from tinkercloud.speculative.observability.acceptance_plot import draw

CASE_BYTES, MAX_AGE = 64 * 1024**2, 10**6
NO_DRAFT = "no draft yet; `tinkercloud draft train` makes one"

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
    """prompts: a file with one on each line, or None for a few of every kind. anew: distil a head
    although there is one, with cases to finetune it on."""

    prompts: Path | None
    config: DistillConfig
    anew: bool = False


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """prompts: as in TrainOptions. export: a file for the cases, besides the drafts' folder."""

    prompts: Path | None
    config: CollectConfig
    export: Path | None = None


def folder_of(config: Config) -> DraftFolder:
    return drafts_of(config.data_dir / "drafts", config.models[0].name)


def status(config: Config, plot: Path | None = None) -> list[str]:
    """The best draft, a line for it and for the latest where that is another; what they learn from;
    how many tokens were accepted. plot: gets a picture of that. Raises UserError where there is
    nothing to draw."""
    folder = folder_of(config)
    lines = [f"drafting with: {folder.find('best') or NO_DRAFT}"]
    versions = dict.fromkeys(folder.find(alias) for alias in ALIASES)
    lines += [_line(folder, version) for version in versions if version is not None]
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
    summary = tracker.as_json()
    if summary["rate"] is None:
        return ["no draft was verified yet"]
    windows = ", ".join(f"last {n}: {rate:.0%}" for n, rate in summary["windows"].items() if rate)
    spread = ", ".join(f"p{q} {share:.0%}" for q, share in summary["percentiles"].items())
    lines = [
        f"accepted: {summary['rate']:.0%} of drafted tokens ({windows}; {spread}; "
        f"{summary['trend_per_step']:+.2%} a step)"
    ]
    for name, category in summary["categories"].items():
        lines.append(f"  {name or 'base model'}: {category['rate']:.0%}")
    return lines


def store_of(folder: DraftFolder) -> CaseStore:
    """The cases that were collected last."""
    store = CaseStore(CASE_BYTES, MAX_AGE)
    path = folder.root / CASES
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            store.read(lines)
    return store


def listed(config: Config) -> list[str]:
    """A line for each draft, the newest last; or that there is none."""
    folder = folder_of(config)
    lines = [_line(folder, version) for version in folder.versions()]
    return lines or [f"{config.models[0].name} has {NO_DRAFT}"]


def _line(folder: DraftFolder, version: str) -> str:
    """Of one draft: its aliases, what is expected of it, why it was trained."""
    notes = folder.notes(version)
    aliases = " ".join(alias for alias in ALIASES if folder.find(alias) == version)
    after = notes.get("after")
    expected = f"{_length(after['mean'])} ({percentages(after['by_depth'])})" if after else ""
    return f"{version}  {aliases:12}  {expected}  {notes.get('reason', '')}".rstrip()


def _target(config: Config, prompts: Path | None) -> Target:
    """The model of the settings, ready to sample."""
    threads = config.engine.threads or usable_cores()
    set_up_torch(threads)
    version, tokenizer = open_target(config)
    tokens = [ids for text in _prompts(prompts) if (ids := tokenizer.encode(text).ids)]
    return Target(version, tokens, threads)


def train(config: Config, options: TrainOptions, say: Say) -> str:
    """Finetunes the best head on collected cases, where there are both; else distils one. Returns
    the version that was written."""
    folder = folder_of(config)
    store, target = store_of(folder), _target(config, options.prompts)
    version = target.version
    if options.anew or folder.find("best") is None or not len(store):
        num_prompts = len(target.prompts)
        say(f"{version.base.name}: {options.config.samples} samples of {num_prompts} prompts")
        texts = sample_texts(target, options.config)
        result = distilled(version, texts, options.config, folder, say)
    else:
        head = open_head(folder, "best", version.base)
        finetune = FinetuneConfig(folder, options.config.minutes)
        result = finetuned(version, head, store, finetune, say)
    say(
        f"{result.version}: {_length(result.after.mean)}, before {result.before.mean:.2f}; "
        f"{'it is the best' if result.promoted else 'not used'}"
    )
    return result.version


def collect(config: Config, options: CollectOptions, say: Say) -> int:
    """Samples with the best head as drafter; returns the number of cases in the folder and in
    `options.export`. Raises ConfigError without a head."""
    folder = folder_of(config)
    target = _target(config, options.prompts)
    drafter = HeadDrafter(*open_head(folder, "best", target.version.base))
    store = store_of(folder)
    before = len(store)
    summary = collected(target, drafter, options.config, store)
    for path in (folder.root / CASES, *([options.export] if options.export else [])):
        store.write(path)
    say(
        f"{summary.num_tokens} tokens, accepted by depth {percentages(summary.by_depth)}; "
        f"{len(store) - before} new cases, {len(store)} in all"
    )
    return len(store)


def evaluate(config: Config, names: Sequence[str], options: CollectOptions, say: Say) -> None:
    """Of each head, on the same samples: the expected acceptance, and that in the engine."""
    folder = folder_of(config)
    target = _target(config, options.prompts)
    texts = sample_texts(target, options.config)
    for name in names or ["best"]:
        head = open_head(folder, name, target.version.base)
        expected = evaluated(target.version, head, texts)
        store = CaseStore(CASE_BYTES, MAX_AGE)
        summary = collected(target, HeadDrafter(*head), options.config, store)
        say(
            f"{folder.resolve(name)}: {_length(expected.mean)} ({percentages(expected.by_depth)}); "
            f"accepted in the engine {percentages(summary.by_depth)}, "
            f"{summary.per_pass:.2f} tokens a pass"
        )


def _length(mean: float) -> str:
    return f"expected accepted length {mean:.2f}"


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
