"""`tinkercloud draft`: what a person does with drafts."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.embedded.tiny import open_store, supervised, train, write_tiny_model
from tinkercloud.cli import main
from tinkercloud.commands.drafts import draft as draft_command
from tinkercloud.commands.drafts.collect import CollectConfig
from tinkercloud.commands.drafts.kinds import folder_of
from tinkercloud.commands.drafts.target import TargetOptions
from tinkercloud.commands.drafts.train import DistillConfig, FinetuneConfig
from tinkercloud.config import Config, load_config
from tinkercloud.core.types import AdamParams, LoraSpec
from tinkercloud.embedded.draft_training.fit import Plan
from tinkercloud.embedded.forward import runners
from tinkercloud.errors import ConfigError, UserError
from tinkercloud.speculative.learning.draft_folder import DraftFolder
from tinkercloud.speculative.observability.acceptance_log import AcceptanceLog, Line

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"text {i}" for i in range(12)))
    return path


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    flags = {"models": f"tiny={model}", "data_dir": str(tmp_path / "data"), "engine.threads": "1"}
    return load_config({**flags, "draft.least_cases": "100", "draft.acceptance": "1"}, {})


def train_options(
    prompts: Path, num_steps: int = 4, *, anew: bool = False
) -> draft_command.TrainOptions:
    plan = Plan(num_steps=num_steps, warmup_steps=2, peak_rate=3e-3)
    return draft_command.TrainOptions(
        TargetOptions(prompts),
        DistillConfig(samples=6, tokens=32, plan=plan),
        FinetuneConfig(minutes=15.0, plan=Plan(num_steps=80, peak_rate=1e-3, warmup_steps=5)),
        anew,
    )


def test_drafts_are_trained_listed_and_rolled_back(config: Config, prompts: Path) -> None:
    assert "draft train" in draft_command.listed(config)[0]
    assert "no draft yet" in draft_command.status(config)[0]
    progress: list[str] = []
    first = draft_command.train(config, train_options(prompts), progress.append)
    second = draft_command.train(config, train_options(prompts), progress.append)
    lines = draft_command.listed(config)
    assert [line.split()[0] for line in lines] == [first, second]
    assert "best latest" in lines[1]
    assert folder_of(config).rollback("best") == first
    assert "best" in draft_command.listed(config)[0]
    assert first in draft_command.status(config)[0]
    prompts.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        draft_command.train(config, train_options(prompts), progress.append)


def test_status_has_a_line_for_the_best_draft_and_one_for_the_latest(config: Config) -> None:
    folder = folder_of(config)
    first = published(folder, 1.5, "distilled")
    folder.use("best", first)
    assert draft_lines(config) == [
        f"{first}  best latest   expected accepted length 1.50 (75% 50%)  distilled"
    ]
    second = published(folder, 1.25, "fell behind")
    assert draft_lines(config) == [
        f"{first}  best          expected accepted length 1.50 (75% 50%)  distilled",
        f"{second}  latest        expected accepted length 1.25 (75% 50%)  fell behind",
    ]


def published(folder: DraftFolder, mean: float, reason: str) -> str:
    after = {"mean": mean, "by_depth": [0.75, 0.5]}
    return folder.publish(lambda path: None, {"after": after, "reason": reason})


def draft_lines(config: Config) -> list[str]:
    return [line for line in draft_command.status(config) if line.startswith("draft-")]


def test_a_head_learns_from_where_it_was_wrong(
    config: Config, prompts: Path, tmp_path: Path
) -> None:
    progress: list[str] = []
    draft_command.train(config, train_options(prompts), progress.append)
    exported = tmp_path / "cases.jsonl"
    collecting = draft_command.CollectOptions(
        TargetOptions(prompts), CollectConfig(samples=6, tokens=32), exported
    )
    count = draft_command.collect(config, collecting, progress.append)
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert len(lines) == count > 200
    wrong = [line for line in lines if line["drafted"] != line["target"]]
    assert len(wrong) > 0.5 * count
    contexts = {line["context"]: line["tokens"] for line in lines if "tokens" in line}
    for line in lines:
        assert contexts[line["context"]][line["position"]] == line["target"]
        assert line["drafted"] in line["top_ids"]
    better = draft_command.train(config, train_options(prompts), progress.append)
    folder = folder_of(config)
    notes = folder.notes(better)
    assert f"{count} collected cases" in notes["reason"]
    assert notes["promoted"]
    assert folder.resolve("best") == better
    assert notes["after"]["mean"] > 1.2 * notes["before"]["mean"]
    assert (
        f"expected accepted length {notes['after']['mean']:.2f}" in draft_command.listed(config)[-1]
    )


@pytest.mark.slow
def test_the_target_alone_an_untrained_and_trained_heads_are_compared_on_the_same_samples(
    config: Config, prompts: Path
) -> None:
    progress: list[str] = []
    draft_command.train(config, train_options(prompts, 1), progress.append)
    more = draft_command.train(config, train_options(prompts, 60, anew=True), progress.append)
    lines = evaluated(config, prompts, ["best"])
    assert list(lines) == ["target alone", "untrained", more]
    assert lines["target alone"].passes == 1.0
    assert lines[str(more)].passes > lines["untrained"].passes > 1.0
    assert lines[str(more)].expected > lines["untrained"].expected


@dataclass(frozen=True)
class Compared:
    """Of one draft, as `evaluate` shows it."""

    expected: float
    passes: float


def evaluated(
    config: Config, prompts: Path, names: Sequence[str] = (), weights: str | None = None
) -> dict[str, Compared]:
    said: list[str] = []
    collecting = draft_command.CollectOptions(
        TargetOptions(prompts, weights=weights), CollectConfig(samples=4, tokens=32, seed=7)
    )
    draft_command.evaluate(config, names, collecting, said.append)
    cells = [re.split(r"\s{2,}", line.strip()) for line in said[1:]]
    return {
        name: Compared(float(expected.replace("-", "0")), float(passes))
        for name, expected, _, _, passes, _, _ in cells
    }


@pytest.fixture
def draft_config(config: Config, tmp_path: Path) -> Config:
    """With a draft model that has the target's tokens, and other weights."""
    folder = tmp_path / "small"
    folder.mkdir()
    draft = write_tiny_model(folder, seed=1)
    return replace(config, speculate=f"model:{draft}")


@pytest.mark.slow
def test_a_draft_model_is_trained_on_samples_then_on_its_disagreements(
    draft_config: Config, prompts: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    first = draft_command.train(draft_config, train_options(prompts, 60), said.append)
    folder = folder_of(draft_config)
    assert folder.resolve("best") == first
    assert folder.notes("best")["after"]["mean"] > 1.1 * folder.notes("best")["before"]["mean"]
    collecting = draft_command.CollectOptions(
        TargetOptions(prompts), CollectConfig(samples=6, tokens=32)
    )
    count = draft_command.collect(draft_config, collecting, said.append)
    assert count > 200
    second = draft_command.train(draft_config, train_options(prompts), said.append)
    assert folder.notes(str(second))["reason"] == f"{count} collected cases"
    lines = evaluated(draft_config, prompts, [str(first)])
    assert list(lines) == ["target alone", "untrained", first]
    assert lines[str(first)].expected > lines["untrained"].expected
    assert folder.notes(str(second))["parent"] == first


def test_a_draft_models_adapter_goes_to_mlx_lms_files_and_back(
    draft_config: Config, prompts: Path, tmp_path: Path
) -> None:
    first = draft_command.train(draft_config, train_options(prompts, 4), lambda line: None)
    exported = tmp_path / "mlx"
    assert draft_command.export(draft_config, "best", exported, mlx=True) == first
    again = draft_command.import_draft(draft_config, exported)
    folder = folder_of(draft_config)
    assert folder.resolve("best") == again != first
    ours, theirs = (
        load_file(folder.path(str(name)) / "adapter_model.safetensors") for name in (first, again)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_drafts_are_compared_on_a_checkpoint_and_on_an_adapter(
    config: Config, model: Path, prompts: Path, tmp_path: Path
) -> None:
    draft_command.train(config, train_options(prompts, 30), lambda line: None)
    store = open_store(model)
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    train(store, "m", [supervised(24, seed) for seed in range(8)])
    store.optim_step("m", AdamParams(learning_rate=0.05))
    checkpoint = config.data_dir / "checkpoints" / "m" / "weights" / "one" / "0"
    adapter = tmp_path / "adapter"
    for folder in (checkpoint, adapter):
        folder.mkdir(parents=True)
        store.save_model("m", folder, with_optimizer=False)
    (adapter / "training_state.json").unlink()
    lines = [
        evaluated(config, prompts, weights=weights)
        for weights in (None, "tinker://m/weights/one", str(adapter))
    ]
    (base, of_checkpoint, of_adapter) = [line["untrained"].expected for line in lines]
    assert of_checkpoint == of_adapter != base


def test_status_shows_and_draws_acceptance(
    config: Config, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = AcceptanceLog(folder_of(config).root)
    for i in range(40):
        log.append(
            [Line(1000.0 + i, i, name, 100, 30 + i, f"draft-{i // 20}") for name in ("", "m")]
        )
    text = "\n".join(draft_command.status(config))
    assert "accepted: 50%" in text
    assert "m: 50%" in text
    assert "+1.00% a step" in text
    picture = tmp_path / "acceptance.png"
    arguments = ["--model", f"tiny={model}", "--data-dir", str(tmp_path / "data")]
    assert main(["draft", "status", "--plot", str(picture), *arguments]) == 0
    assert str(picture) in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_or_collected_says_why(
    config: Config, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        draft_command.status(config, tmp_path / "a.png")
    with pytest.raises(ConfigError, match="draft train"):
        draft_command.collect(
            config,
            draft_command.CollectOptions(TargetOptions(prompts), CollectConfig()),
            lambda line: None,
        )
