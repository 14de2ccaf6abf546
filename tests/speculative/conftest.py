"""What the tests of draft training share: a taught head, a tiny model in a folder."""

from pathlib import Path

import pytest

from tests.numerics.tiny import write_tiny_model
from tests.speculative.toy_policy import ToyPolicy, filled, fitted, student_of
from tinkercloud.embedded.head_student import HeadStudent


@pytest.fixture(scope="module")
def taught() -> tuple[ToyPolicy, HeadStudent]:
    """A policy, and a head that has learned to draft for it."""
    policy = ToyPolicy(0)
    student = student_of(policy.weights)
    fitted(student, filled(policy))
    return policy, student


@pytest.fixture(scope="module")
def folder_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))
