"""The tiny random model that the engine's tests share."""

from pathlib import Path

import pytest

from tests.embedded.decode_scene import FAMILIES, random_base, tiny_config
from tests.embedded.tiny import open_store
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore


@pytest.fixture
def store(folder: Path) -> ModelStore:
    return open_store(folder)


@pytest.fixture(params=FAMILIES, scope="module")
def base(request: pytest.FixtureRequest) -> BaseModel:
    """Each family of networks, tiny."""
    return random_base(tiny_config(request.param))


@pytest.fixture(scope="module")
def llama() -> BaseModel:
    return random_base(tiny_config("Llama"))
