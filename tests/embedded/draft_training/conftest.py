"""What the tests of draft training share: a trained head, a tiny model in a folder."""

from pathlib import Path

import pytest

from tests.embedded.draft_training.toy_policy import ToyPolicy, filled, fitted, trainer_of
from tests.embedded.tiny import write_tiny_model
from tinkercloud.embedded.draft_training.head_trainer import HeadTrainer


@pytest.fixture(scope="module")
def trained_head() -> tuple[ToyPolicy, HeadTrainer]:
    """A policy, and a head that has learned to draft for it."""
    policy = ToyPolicy(0)
    trainer = trainer_of(policy.weights)
    fitted(trainer, filled(policy))
    return policy, trainer


@pytest.fixture(scope="module")
def folder_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
