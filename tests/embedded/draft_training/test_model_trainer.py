"""Training of draft models on the cases in which they were wrong."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.embedded.draft_training.toy_policy import (
    ROOM_BYTES,
    endless,
    same_bits,
    same_gradients,
    tiny_version,
)
from tests.embedded.tiny import random_prompt
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.capture import SequenceMetadata, capture_sequence
from tinkercloud.embedded.draft_training.dataset import CaseDataset, Mix
from tinkercloud.embedded.draft_training.driver import TrainingDriver, TrainingSettings
from tinkercloud.embedded.draft_training.fit import Plan, copied
from tinkercloud.embedded.draft_training.model_trainer import (
    CaseExample,
    DraftModelTrainer,
    ModelObjective,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest
from tinkercloud.speculative.learning.draft_folder import DraftFolder


def examples_of(target: Version, count: int) -> Iterator[tuple[np.ndarray, Case]]:
    """Cases of a target that says other things than the draft would."""
    for seed in range(count):
        tokens = np.array(random_prompt(14, seed), np.int32)
        captured = capture_sequence(target, tokens, (2,), 1, SequenceMetadata(0.8, 0, top=8))
        for position in range(6, 12):
            probs = captured.top_probs[position - 1]
            ids = captured.top_ids[position - 1]
            target_token = int(ids[0])
            drafted = target_token if seed % 3 == 0 else int(ids[1])
            name = digest(tokens)
            yield tokens, Case(name, position, drafted, target_token, ids, probs, 0.8, "v", 0)


@pytest.fixture(scope="module")
def small_model(folder_of_tiny) -> tuple[Version, CaseStore]:
    """A draft's model, and what it got wrong about a target whose unembedding has moved."""
    version = tiny_version(folder_of_tiny)
    generator = torch.Generator().manual_seed(5)
    head = version.base.weights["lm_head"]
    shift = torch.randn(len(head), 2, generator=generator) @ torch.randn(
        2, head.shape[1], generator=generator
    )
    moved = {**version.base.weights, "lm_head": head + 0.6 * head.std() * shift}
    store = CaseStore(ROOM_BYTES, 4)
    for tokens, case in examples_of(Version("target", version.base, moved, None, 1.0), 160):
        store.add(tokens, case)
    return version, store


def test_the_parts_of_a_batch_have_its_gradient(small_model):
    version, store = small_model
    trainer = DraftModelTrainer(version.base, LoraSpec(4, 0), ModelObjective())
    with torch.no_grad():  # else half of the gradients are 0
        for tensor in trainer.params.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    batch = CaseDataset(store, Mix(batch_size=16)).batch(0)
    assert len({example.case.agreed for example in batch}) == 2
    parts = trainer.parts(batch)
    assert len(parts) > 2 and sum(len(part) for part, _ in parts) == len(batch)
    same_gradients(trainer, batch, parts)


def test_a_draft_model_learns_from_its_disagreements(small_model, tmp_path):
    version, store = small_model
    before = copied(version.base.weights)
    trainer = DraftModelTrainer(version.base, LoraSpec(4, 0), ModelObjective())
    driver = TrainingDriver(
        trainer, CaseDataset(store, Mix(batch_size=32)), DraftFolder(tmp_path), endless(),
        TrainingSettings(Plan(num_steps=50, peak_rate=1e-3)),
    )  # fmt: skip
    first = driver.publish({})
    result = driver.work("now")
    assert result is not None
    assert result.promoted
    assert result.after.mean > result.before.mean + 0.02
    assert same_bits(version.base.weights, before)
    assert driver.use(first) == first
    assert all(not t.any() for n, t in driver.served.items() if n.endswith("lora_B"))


def test_cases_of_one_context_are_evaluated_as_each_alone(small_model):
    version, store = small_model
    trainer = DraftModelTrainer(version.base, LoraSpec(4, 0), ModelObjective())
    examples = [CaseExample(store.tokens(case), case) for case in list(store.disagreed)[:9]]
    together = trainer.evaluate(examples).per_row
    apart = [trainer.evaluate([example]).per_row[0] for example in examples]
    assert np.allclose(together, apart, atol=1e-5)


def test_a_disagreement_weighs_more_than_an_agreed_case(small_model):
    version, store = small_model
    pair = [
        CaseExample(store.tokens(case), case)
        for case in (next(iter(store.disagreed)), next(iter(store.agreed)))
    ]
    losses = {}
    for weight in (1.0, 3.0):
        training = ModelObjective(disagreed_weight=weight)
        trainer = DraftModelTrainer(version.base, LoraSpec(4, 0), training)
        each = [float(trainer.loss([example]).detach()) for example in pair]
        losses[weight] = float(trainer.loss(pair).detach())
        expected = (weight * each[0] + each[1]) / (weight + 1)
        assert losses[weight] == pytest.approx(expected, rel=1e-4)
