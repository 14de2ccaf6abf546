"""A head made from a model's own samples: it stands more often, and only for its model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import Drafting
from tests.embedded.tiny import Sampler, ask, open_store, random_prompt
from tinkercloud.commands.draft_distill import DistillConfig, distilled, sample_texts
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.fit import Plan
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.version import Version
from tinkercloud.errors import ConfigError, UserError
from tinkercloud.speculative.learning.draft_folder import DraftFolder

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
WANTED = DistillConfig(
    samples=8, tokens=40, vocabulary=200, plan=Plan(num_steps=60, warmup_steps=5, peak_rate=3e-3)
)


@pytest.fixture(scope="module")
def made(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftFolder, dict[str, object]]:
    base = open_store(folder).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    prompts = [random_prompt(6, i) for i in range(12)]
    texts = sample_texts(version, prompts, WANTED, 1)
    assert [num for num, _ in texts] == [6] * 96
    target = drafts_of(tmp_path_factory.mktemp("drafts"), "some/tiny model")
    said: list[str] = []
    notes = distilled(version, texts, WANTED, target, said.append)
    assert any("step 60 of 60" in line for line in said)
    return target, notes


def test_the_taught_head_is_expected_to_stand_more_often(
    made: tuple[DraftFolder, dict[str, object]],
) -> None:
    folder, notes = made
    assert folder.resolve("best") == folder.resolve("latest") == notes["version"]
    assert notes["after"]["mean"] > 1.3 * notes["before"]["mean"]
    assert folder.notes("best")["after"] == {
        "mean": notes["after"]["mean"],
        "by_depth": list(notes["after"]["by_depth"]),
    }


def test_the_taught_head_stands_more_often_in_the_engine_and_changes_nothing(
    folder: Path, made: tuple[DraftFolder, dict[str, object]], tmp_path: Path
) -> None:
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    request = ask(random_prompt(6, 77), n=16, max_tokens=60, seed=5, use_eos=False)
    plain = Sampler(store).one(base, request)
    untaught = drafts_of(tmp_path, "untaught")
    version = store.version(base)
    least = DistillConfig(samples=8, tokens=40, plan=Plan(num_steps=1, peak_rate=1e-9))
    texts = sample_texts(version, [random_prompt(6, i) for i in range(12)], least, 1)
    distilled(version, texts, least, untaught, lambda line: None)
    accepted = {}
    for name, drafts in (("untaught", untaught), ("taught", made[0])):
        head = open_head(drafts, "best", version.base)
        drafting = Drafting(lambda _, head=head: HeadDrafter(*head), 3)
        found = Sampler(store, speculate=drafting).one(base, request)
        for one, other in zip(found.sequences, plain.sequences, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
        verified = sum(told.num_verified for told in drafting.policy.rounds)
        accepted[name] = drafting.policy.num_accepted / verified
    assert accepted["taught"] > accepted["untaught"]


def test_a_head_of_another_model_is_refused(
    made: tuple[DraftFolder, dict[str, object]], folder: Path, tmp_path: Path
) -> None:
    base = open_store(folder).base("tiny")
    with pytest.raises(ConfigError, match=r"no draft head yet.*draft train"):
        open_head(drafts_of(tmp_path, "other"), "best", base)
    path = made[0].path("best") / "head.safetensors"
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
    texts = sample_texts(version, [random_prompt(3, 0)], least, 1)
    with pytest.raises(UserError, match="too little text"):
        distilled(version, texts, least, drafts_of(tmp_path, "m"), lambda line: None)
