"""Small models that learn to draft from the cases where they were wrong."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.embedded.draft_training.toy_policy import (
    ROOM_BYTES,
    endless,
    same_bits,
    tiny_version,
)
from tests.embedded.tiny import random_prompt
from tinkercloud.core.types import LoraSpec
from tinkercloud.embedded.draft_training.dataset import Lessons, Mix
from tinkercloud.embedded.draft_training.fit import Plan, copied
from tinkercloud.embedded.draft_training.head_model import Told
from tinkercloud.embedded.draft_training.reference_capture import capture
from tinkercloud.embedded.draft_training.small_model import Lesson, ModelStudent, ModelTraining
from tinkercloud.embedded.draft_training.trainer import DraftTrainer, DraftTraining
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest
from tinkercloud.speculative.learning.draft_folder import DraftFolder


def lessons_of(target: Version, count: int) -> Iterator[tuple[np.ndarray, Case]]:
    """Cases of a target that says other things than the draft would."""
    for seed in range(count):
        tokens = np.array(random_prompt(14, seed), np.int32)
        captured = capture(target, tokens, (2,), Told(1, 0.8, 0, count=8))
        for position in range(6, 12):
            law = captured.top_probs[position - 1]
            ids = captured.top_ids[position - 1]
            said = int(ids[0])
            drafted = said if seed % 3 == 0 else int(ids[1])
            name = digest(tokens)
            yield tokens, Case(name, position, drafted, said, ids, law, 0.8, "v", 0)


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
    for tokens, case in lessons_of(Version("target", version.base, moved, None, 1.0), 160):
        store.add(tokens, case)
    return version, store


def test_a_small_model_learns_from_its_disagreements(small_model, tmp_path):
    version, store = small_model
    before = copied(version.base.weights)
    student = ModelStudent(version.base, LoraSpec(4, 0), ModelTraining())
    trainer = DraftTrainer(
        student, Lessons(store, Mix(batch_size=32)), DraftFolder(tmp_path), endless(),
        DraftTraining(Plan(num_steps=50, peak_rate=1e-3)),
    )  # fmt: skip
    first = trainer.publish({})
    outcome = trainer.work("now")
    assert outcome is not None
    assert outcome.promoted
    assert outcome.after.mean > outcome.before.mean + 0.02
    assert same_bits(version.base.weights, before)
    assert trainer.use(first) == first
    assert all(not t.any() for n, t in trainer.served.items() if n.endswith("lora_B"))


def test_lessons_of_one_context_are_those_that_each_alone_would_be(small_model):
    version, store = small_model
    student = ModelStudent(version.base, LoraSpec(4, 0), ModelTraining())
    lessons = [Lesson(store.tokens(case), case) for case in list(store.disagreed)[:9]]
    together = student.evaluate(lessons).per_row
    apart = [student.evaluate([lesson]).per_row[0] for lesson in lessons]
    assert np.allclose(together, apart, atol=1e-5)


def test_a_disagreement_weighs_more_than_an_agreed_case(small_model):
    version, store = small_model
    pair = [
        Lesson(store.tokens(case), case)
        for case in (next(iter(store.disagreed)), next(iter(store.agreed)))
    ]
    losses = {}
    for weight in (1.0, 3.0):
        training = ModelTraining(disagreed_weight=weight)
        student = ModelStudent(version.base, LoraSpec(4, 0), training)
        each = [float(student.loss([lesson]).detach()) for lesson in pair]
        losses[weight] = float(student.loss(pair).detach())
        expected = (weight * each[0] + each[1]) / (weight + 1)
        assert losses[weight] == pytest.approx(expected, rel=1e-4)
