"""A head distilled from a model's own samples: more of its tokens are accepted; it serves its model
only."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import Drafting
from tests.embedded.tiny import Sampler, ask, open_store, random_prompt
from tinkercloud.commands.drafts.collect import sample_texts
from tinkercloud.commands.drafts.target import Target
from tinkercloud.commands.drafts.train import DistillConfig, distilled
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.draft_training.driver import TrainingResult
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.fit import Plan
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError, UserError
from tinkercloud.speculative.learning.draft_folder import DraftFolder

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
CONFIG = DistillConfig(
    samples=8, tokens=40, vocabulary=200, plan=Plan(num_steps=60, warmup_steps=5, peak_rate=3e-3)
)


@pytest.fixture(scope="module")
def distillation(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftFolder, TrainingResult]:
    base = open_store(folder).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    prompts = [random_prompt(6, i) for i in range(12)]
    texts = sample_texts(Target(version, prompts, 1), CONFIG)
    assert [text.num_prompt for text in texts] == [6] * 96
    drafts = drafts_of(tmp_path_factory.mktemp("drafts"), "some/tiny model")
    lines: list[str] = []
    result = distilled(version, texts, CONFIG, drafts, lines.append)
    assert any("step 60 of 60" in line for line in lines)
    return drafts, result


def test_more_tokens_of_the_distilled_head_are_expected_to_be_accepted(
    distillation: tuple[DraftFolder, TrainingResult],
) -> None:
    folder, result = distillation
    assert folder.resolve("best") == folder.resolve("latest") == result.version
    assert result.after.mean > 1.3 * result.before.mean
    notes = folder.notes("best")
    assert notes["after"] == result.after.as_json()
    assert notes["num_steps"] == 60
    assert notes["num_tokens"] > 96 * 6
    assert 0.5 < notes["coverage"] <= 1


def test_the_distilled_head_is_accepted_more_often_in_the_engine_and_changes_nothing(
    folder: Path, distillation: tuple[DraftFolder, TrainingResult], tmp_path: Path
) -> None:
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    request = ask(random_prompt(6, 77), n=16, max_tokens=60, seed=5, use_eos=False)
    plain = Sampler(store).one(base, request)
    fresh = drafts_of(tmp_path, "fresh")
    version = store.version(base)
    least = DistillConfig(samples=8, tokens=40, plan=Plan(num_steps=1, peak_rate=1e-9))
    texts = sample_texts(Target(version, [random_prompt(6, i) for i in range(12)], 1), least)
    distilled(version, texts, least, fresh, lambda line: None)
    accepted = {}
    for name, drafts in (("fresh", fresh), ("distilled", distillation[0])):
        head = open_head(drafts, "best", version.base)
        drafting = Drafting(lambda _, head=head: HeadDrafter(TorchHead(*head)), 3)
        drafted = Sampler(store, speculate=drafting).one(base, request)
        for a, b in zip(drafted.sequences, plain.sequences, strict=True):
            assert np.array_equal(a.tokens, b.tokens)
        verified = sum(turn.num_verified for turn in drafting.policy.rounds)
        accepted[name] = drafting.policy.num_accepted / verified
    assert accepted["distilled"] > accepted["fresh"]


def test_a_head_of_another_model_is_refused(
    distillation: tuple[DraftFolder, TrainingResult], folder: Path, tmp_path: Path
) -> None:
    base = open_store(folder).base("tiny")
    with pytest.raises(ConfigError, match=r"no draft head yet.*draft train"):
        open_head(drafts_of(tmp_path, "other"), "best", base)
    path = distillation[0].path("best") / "head.safetensors"
    from tinkercloud.weights.checkpoints import read_tensors, write_tensors

    tensors = read_tensors(path)
    tensors["fuse"] = torch.zeros(3, 3)
    other = drafts_of(tmp_path, "broken")
    name = other.publish(lambda at: write_tensors(tensors, at / "head.safetensors"), {})
    other.use("best", name)
    with pytest.raises(ConfigError, match="other sizes"):
        open_head(other, "best", base)


def test_too_little_text_is_refused(folder: Path, tmp_path: Path) -> None:
    base = open_store(folder).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    least = DistillConfig(samples=1, tokens=5)
    texts = sample_texts(Target(version, [random_prompt(3, 0)], 1), least)
    with pytest.raises(UserError, match="too little text"):
        distilled(version, texts, least, drafts_of(tmp_path, "m"), lambda line: None)
