"""The tiny random model in float32 and in bfloat16, for tests of the engine as it is."""

from pathlib import Path

import pytest
import torch

from tests.embedded.tiny import open_store
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.process.model_store import ModelStore


@pytest.fixture
def store(folder: Path, dtype: torch.dtype) -> ModelStore:
    return open_store(folder, dtype=dtype)


@pytest.fixture
def base(store: ModelStore) -> str:
    """A version of the base model."""
    return store.publish(FromBase("tiny"))
