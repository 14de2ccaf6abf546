"""What drafts have learned is on disk: the next engine drafts with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embedded.draft_training.test_online_trainer import publish_untrained
from tests.embedded.draft_training.toy_policy import same_bits, tiny_version
from tests.embedded.process.worker_driver import Driver
from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import ask, open_store, random_prompt
from tests.waiting import wait_for
from tinkercloud.core.types import FromBase, SampleOutput
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.fit import copied
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.model_trainer import DraftModelTrainer, ModelObjective
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, model_trainee
from tinkercloud.embedded.process.protocol import Publish, Sample
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.draft_folder import DraftFolder

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


def moved(trainer: HeadTrainer | DraftModelTrainer) -> dict[str, torch.Tensor]:
    """What it has, as if it had learned something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.params.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return copied(trainer.params)


def test_the_next_engine_drafts_with_the_head_that_was_trained(
    folder: Path, tmp_path: Path
) -> None:
    publish_untrained(folder, tmp_path)
    base = open_store(folder).base("tiny")
    trainer = HeadTrainer(*untaught_head(base), HeadObjective())
    learned = moved(trainer)
    drafts = drafts_of(tmp_path, "tiny")
    name = drafts.publish(lambda path: trainer.write(learned, path), {"reason": "trained"})
    drafts.use("best", name)
    assert same_bits(open_head(drafts, "best", base)[1], learned)
    driver = Driver(folder, tmp_path, "head")
    try:
        version = driver.call(Publish(FromBase("tiny")))
        request = ask(random_prompt(18, 1), max_tokens=16, seed=1, use_eos=False)
        drawn = driver.call(Sample(version, request))
        assert isinstance(drawn, SampleOutput)

        def read() -> dict[str, Any] | None:
            driver.call(Publish(FromBase("tiny")))
            return driver.stats.speculation.get("tiny")

        stats = wait_for("there are figures of speculation", read)
        assert stats is not None
        assert stats["following"]["draft"] == name != "draft-000001"
    finally:
        driver.end()


def test_the_next_engine_drafts_with_what_a_draft_model_has_learned(
    folder_of_tiny, tmp_path: Path
) -> None:
    version = tiny_version(folder_of_tiny)
    base = version.base
    settings = DrafterSettings("model", None, 1, tmp_path, tmp_path)
    trainer = DraftModelTrainer(base, settings.lora, ModelObjective())
    learned = moved(trainer)
    folder = DraftFolder(tmp_path)
    folder.use("best", folder.publish(lambda path: trainer.write(learned, path), {}))
    pool = BlockPool(base.config, base.dtype, base.device, 8)
    drafter = ModelDrafter(version, NativeRunner(1), pool)
    assert drafter.version.adapter is None
    trainee = model_trainee(drafter, settings, CaseStore(1 << 20, 4), folder)
    assert same_bits(copied(trainee.trainer.params), learned)
    adapter = drafter.version.adapter
    assert adapter is not None
    matrices = [matrix for pair in adapter.values() for matrix in pair]
    assert len(matrices) == len(learned)
    assert all(any(torch.equal(each, t) for t in learned.values()) for each in matrices)


def test_an_adapter_of_another_rank_is_left_and_the_draft_model_learns_anew(
    folder_of_tiny, tmp_path: Path
) -> None:
    version = tiny_version(folder_of_tiny)
    base, folder = version.base, DraftFolder(tmp_path)
    of_eight = DrafterSettings("model", None, 1, tmp_path, tmp_path)
    trainer = DraftModelTrainer(base, of_eight.lora, ModelObjective())
    folder.use("best", folder.publish(lambda path: trainer.write(trainer.params, path), {}))
    drafter = ModelDrafter(
        version, NativeRunner(1), BlockPool(base.config, base.dtype, base.device, 8)
    )
    of_four = replace(of_eight, rank=4)
    trainee = model_trainee(drafter, of_four, CaseStore(1 << 20, 4), folder)
    assert drafter.version.adapter is None
    ranks = {t.shape[0] for n, t in trainee.trainer.params.items() if n.endswith("lora_A")}
    assert ranks == {4}
