"""What `tinkercloud draft` does: list a model's drafts, train and compare them, choose one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from tinkercloud.commands.bench import aligned, open_target, percentages
from tinkercloud.commands.drafts.collect import (
    CollectConfig,
    Collected,
    collected,
    plain_tokens_per_s,
    sample_texts,
)
from tinkercloud.commands.drafts.kinds import (
    DraftKind,
    HeadKind,
    ModelKind,
    folder_of,
    kind_of,
)
from tinkercloud.commands.drafts.target import Target, TargetOptions, open_draft_target
from tinkercloud.commands.drafts.train import (
    CASE_BYTES,
    MAX_AGE,
    DistillConfig,
    FinetuneConfig,
    Say,
    distilled,
    distilled_model,
    finetuned,
)
from tinkercloud.config import Config
from tinkercloud.embedded.draft_training.driver import TrainingResult
from tinkercloud.embedded.draft_training.files import has_trained
from tinkercloud.embedded.draft_training.fit import Evaluation
from tinkercloud.embedded.draft_training.online_trainer import CASES
from tinkercloud.errors import UserError
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import ALIASES, DraftFolder
from tinkercloud.speculative.observability.acceptance_log import (
    AcceptanceTracker,
    read_moments,
    tracker_of,
)
from tinkercloud.speculative.observability.acceptance_plot import draw
from tinkercloud.weights.adapters import save_adapter
from tinkercloud.weights.mlx_adapters import write_mlx_adapter

NO_DRAFT = "no draft yet; `tinkercloud draft train` makes one"

UNTRAINED, COLUMNS = (
    "untrained",
    ("", "expected length", "expected by depth", "accepted by depth", "tokens a pass", "tokens/s",
     "times"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """anew: make a draft although there is one, with cases to finetune it on."""

    target: TargetOptions
    distill: DistillConfig
    finetune: FinetuneConfig
    anew: bool = False


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """export: a file for the cases, besides the drafts' folder."""

    target: TargetOptions
    config: CollectConfig
    export: Path | None = None


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


def train(config: Config, options: TrainOptions, say: Say) -> str | None:
    """Finetunes the best draft on collected cases, where there are both; else distils a new one.
    Returns the version that was written, None where the best one is good enough. Raises UserError
    where fewer cases were collected than `draft.least_cases`."""
    target = open_draft_target(config, options.target)
    kind = kind_of(config, target.version.base)
    store, least = store_of(kind.folder), config.draft.least_cases
    is_new = kind.folder.find("best") is None
    if isinstance(kind, HeadKind):
        is_new = not has_trained(kind.folder)  # a server has one that it has not trained yet
    if options.anew or is_new or not len(store):
        result = _distilled(kind, target, options.distill, say)
    elif len(store) < least:
        raise UserError(
            f"{len(store)} cases were collected, fewer than draft.least_cases ({least}): collect "
            "more, or make a new draft (--anew)"
        )
    else:
        result = finetuned(target.version, kind, store, options.finetune, say)
    if result is None:
        return None
    say(
        f"{result.version}: {_length(result.after.mean)}, before {result.before.mean:.2f}; "
        f"{'it is the best' if result.promoted else 'not used'}"
    )
    return result.version


def _distilled(
    kind: HeadKind | ModelKind, target: Target, config: DistillConfig, say: Say
) -> TrainingResult:
    version = target.version
    say(f"{version.base.name}: {config.samples} samples of {len(target.prompts)} prompts")
    texts = sample_texts(target, config)
    if isinstance(kind, HeadKind):
        return distilled(version, texts, config, kind.folder, say)
    return distilled_model(version, texts, config, kind, say)


def collect(config: Config, options: CollectOptions, say: Say) -> int:
    """Samples with the best draft, or with a draft model as it is where it has learned nothing yet;
    returns the number of cases in the folder and in `options.export`. Raises ConfigError without a
    head."""
    target = open_draft_target(config, options.target)
    kind = kind_of(config, target.version.base)
    store = store_of(kind.folder)
    before = len(store)
    is_new = isinstance(kind, ModelKind) and kind.folder.find("best") is None
    weights = kind.untrained() if is_new else kind.named("best")
    make = partial(kind.drafter, weights)
    summary = collected(target, make, options.config, store).acceptance
    for path in (kind.folder.root / CASES, *([options.export] if options.export else [])):
        store.write(path)
    say(
        f"{summary.num_tokens} tokens, accepted by depth {percentages(summary.by_depth)}; "
        f"{len(store) - before} new cases, {len(store)} in all"
    )
    return len(store)


def evaluate(config: Config, names: Sequence[str], options: CollectOptions, say: Say) -> None:
    """The target alone, an untrained draft and those named ([]: the best, where there is one), on
    the same samples: the expected acceptance, that in the engine, and tokens per second."""
    target = open_draft_target(config, options.target)
    kind = cast(DraftKind[Any], kind_of(config, target.version.base))
    best = kind.folder.find("best")
    versions = [kind.folder.resolve(name) for name in names or ([best] if best else [])]
    texts = sample_texts(target, options.config)
    alone = plain_tokens_per_s(target, options.config)
    lines: list[tuple[str, ...]] = [
        COLUMNS,
        ("target alone", "-", "-", "-", "1.00", f"{alone:.1f}", "1.00"),
    ]
    for name in (UNTRAINED, *versions):
        weights = kind.untrained() if name == UNTRAINED else kind.named(name)
        expected = kind.expected(target.version, weights, texts)
        store = CaseStore(CASE_BYTES, MAX_AGE)
        run = collected(target, partial(kind.drafter, weights), options.config, store)
        lines.append(_compared(name, expected, run, alone))
    for line in aligned(lines):
        say(line)


def _compared(name: str, expected: Evaluation, run: Collected, alone: float) -> tuple[str, ...]:
    """In the order of COLUMNS."""
    mean = f"{expected.mean:.2f}" if expected.by_depth else "-"
    by_depth = percentages(expected.by_depth) if expected.by_depth else "-"
    return (
        name, mean, by_depth, percentages(run.acceptance.by_depth),
        f"{run.acceptance.per_pass:.2f}", f"{run.tokens_per_s:.1f}",
        f"{run.tokens_per_s / alone:.2f}",
    )  # fmt: skip


def export(config: Config, name: str, folder: Path, *, mlx: bool) -> str:
    """A draft model's adapter as PEFT's two files, or MLX-LM's; the version. Raises UserError for a
    head, which no other program loads."""
    kind = _model_kind(config)
    weights = kind.named(name)
    folder.mkdir(parents=True, exist_ok=True)
    if mlx:
        num_layers = kind.draft.config.num_layers
        write_mlx_adapter(weights.adapter, weights.spec, num_layers, folder)
    else:
        save_adapter(weights.adapter, weights.spec, kind.draft.name, folder)
    return kind.folder.resolve(name)


def import_draft(config: Config, folder: Path) -> str:
    """PEFT's or MLX-LM's adapter of the draft model becomes its best draft; the version."""
    kind = _model_kind(config)
    weights = kind.read(folder)
    trainer = kind.trainer(weights)
    version = kind.folder.publish(
        lambda path: trainer.write(trainer.params, path), {"reason": f"imported from {folder}"}
    )
    kind.folder.use("best", version)
    return version


def _model_kind(config: Config) -> ModelKind:
    base, _ = open_target(config)
    kind = kind_of(config, base.base)
    if isinstance(kind, HeadKind):
        raise UserError("heads stay here: name the draft model (--speculate model:PATH)")
    return kind


def _length(mean: float) -> str:
    return f"expected accepted length {mean:.2f}"
