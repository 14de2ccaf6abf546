"""T7 in the engine: acceptance falls as the policy learns a style; trained drafts win it back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.embedded.tiny import Sampler, ask, open_store, random_prompt, train
from tinkercloud.commands.drafts.collect import CaseRecorder, sample_texts
from tinkercloud.commands.drafts.target import Target
from tinkercloud.commands.drafts.train import DistillConfig, distilled
from tinkercloud.core.types import AdamParams, Datum, FromModel, LoraSpec, TrainBatch
from tinkercloud.embedded.draft_training.capture import (
    CaptureSettings,
    PassCapture,
    SequenceMetadata,
)
from tinkercloud.embedded.draft_training.dataset import Mix, SequenceDataset
from tinkercloud.embedded.draft_training.driver import (
    TrainingDriver,
    TrainingResult,
    TrainingSettings,
)
from tinkercloud.embedded.draft_training.files import drafts_of, open_head
from tinkercloud.embedded.draft_training.fit import Plan
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.online_trainer import DraftTrainee
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner, Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, model_trainee
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling.speculation import DraftObserver, Speculation
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.schedule import TimeBudget

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
STYLE_STEPS, DRAFTED = 40, 3


def style(seed: int, length: int = 40) -> list[int]:
    """The style: each token follows from the one before it."""
    tokens = [int(np.random.default_rng(seed).integers(0, 200))]
    while len(tokens) < length:
        tokens.append((5 * tokens[-1] + 17) % 200)
    return tokens


def datum(seed: int) -> Datum:
    tokens = style(seed)
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "weights": np.ones(len(tokens) - 1, np.float32) / 16,
    }
    return Datum(np.array(tokens[:-1], np.int32), inputs)


@dataclass
class Scene:
    """base: what drafts were made for. policy: the same model after training on the style."""

    store: ModelStore
    base: Version
    policy: Version


@pytest.fixture(scope="module")
def scene(folder: Path) -> Scene:
    store = open_store(folder)
    store.create_model("m", "tiny", LoraSpec(rank=16, seed=0))
    for step in range(STYLE_STEPS):
        train(store, "m", [datum(16 * step + i) for i in range(16)])
        store.optim_step("m", AdamParams(learning_rate=0.02))
    base = store.base("tiny")
    policy = store.version(store.publish(FromModel("m")))
    return Scene(store, Version("b", base, base.weights, None, 1.0), policy)


def acceptance(
    scene: Scene, version: Version, drafter: Drafter, observer: DraftObserver | None = None
) -> float:
    """The share of verified tokens that are accepted, of the same samples whoever drafts."""
    speculations: list[Speculation] = []

    def make(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        if drafter.layers:
            runner.capture(base, drafter.layers)
        guard = GuardedDrafter(drafter, base.config.vocab_size)
        speculations.append(Speculation(guard, FixedLength(DRAFTED), None, observer))
        return speculations[-1]

    sampler = Sampler(scene.store, speculate=make)
    for i in range(8):
        request = ask(style(9000 + i, 3), n=4, max_tokens=32, seed=i, use_eos=False)
        sampler.engine.submit(version, request, lambda output: None)
    while sampler.engine.busy:
        sampler.engine.step()
    depths = speculations[0].snapshot()["drafters"][drafter.name]["depths"]
    return sum(d["accepted"] for d in depths) / sum(d["verified"] for d in depths)


def weights_of(base: BaseModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in base.weights.items()}


def trained(
    trainee: DraftTrainee, folder: Any, plan: Plan
) -> tuple[TrainingDriver[Any], TrainingResult]:
    budget = TimeBudget(1.0, 1e9)
    budget.step_took(1e9)
    driver = TrainingDriver(
        trainee.trainer, trainee.dataset, folder, budget, TrainingSettings(plan)
    )
    driver.publish({})
    result = driver.work("the policy has another style")
    assert result is not None
    return driver, result


def seen_in_training(scene: Scene, layers: Sequence[int], dataset: SequenceDataset) -> None:
    """The policy's own passes, in one more step of training."""

    def watch(base: BaseModel, model_ids: Sequence[str]) -> PassCapture:
        metadata = [SequenceMetadata(1.0, 1, category=name) for name in model_ids]
        return PassCapture(
            CaptureSettings(tuple(layers), 4000, 0, metadata), dataset.add, TimeBudget()
        )

    queue = TrainingQueue(Limits(1024), watch)
    batch = TrainBatch(tuple(datum(5000 + i) for i in range(64)), "cross_entropy")
    queue.add(0, scene.store.model("m"), batch)
    (done,) = queue.step(60.0)
    assert done.error is None
    scene.store.model("m").grads = {}


def test_a_head_falls_behind_a_new_style_and_catches_up_on_the_policys_own_passes(
    scene: Scene, tmp_path: Path
) -> None:
    config = DistillConfig(
        samples=8,
        tokens=40,
        vocabulary=260,
        plan=Plan(num_steps=60, warmup_steps=5, peak_rate=3e-3),
    )
    texts = sample_texts(Target(scene.base, [random_prompt(6, i) for i in range(12)], 1), config)
    folder = drafts_of(tmp_path, "tiny")
    distilled(scene.base, texts, config, folder, lambda line: None)
    head, params = open_head(folder, "best", scene.base.base)
    before = weights_of(scene.base.base)
    before_training = acceptance(scene, scene.policy, HeadDrafter(TorchHead(head, params)))
    dataset = SequenceDataset(1 << 28, 4, Mix(held_out_one_in=5))
    seen_in_training(scene, head.config.layers, dataset)
    drafter = HeadDrafter(TorchHead(head, params))
    trainee = DraftTrainee(HeadTrainer(head, params, HeadObjective()), dataset, drafter.use)
    driver, result = trained(trainee, folder, Plan(num_steps=50, peak_rate=3e-3))
    assert result.promoted
    trainee.use(driver.served)
    after_training = acceptance(scene, scene.policy, drafter)
    assert after_training > before_training + 0.15, (before_training, after_training)
    assert result.after.mean > result.before.mean + 0.2
    for name, tensor in scene.base.base.weights.items():
        assert torch.equal(tensor, before[name])


def test_a_draft_model_falls_behind_a_new_style_and_catches_up_on_its_disagreements(
    scene: Scene, tmp_path: Path
) -> None:
    """The model before training is the draft."""
    base = scene.base.base
    draft = replace(base, name="draft")
    version = Version("draft", draft, draft.weights, None, 1.0)
    pool = BlockPool(base.config, base.dtype, base.device, 400)
    drafter = ModelDrafter(version, NativeRunner(1), pool)
    store, folder = CaseStore(1 << 24, 100), drafts_of(tmp_path, "draft")
    settings = DrafterSettings("model", None, 1, tmp_path, tmp_path)
    trainee = model_trainee(drafter, settings, store, folder)
    before = weights_of(base)
    before_training = acceptance(scene, scene.policy, drafter, CaseRecorder(store))
    assert len(store.disagreed) > 100
    plan = Plan(num_steps=60, peak_rate=1e-2, accumulate=2)
    driver, result = trained(trainee, folder, plan)
    assert result.promoted
    trainee.use(driver.served)
    after_training = acceptance(scene, scene.policy, drafter)
    assert after_training > before_training + 0.15, (before_training, after_training)
    for name, tensor in base.weights.items():
        assert torch.equal(tensor, before[name])
