"""The tiny random model that the engine's tests share."""

from pathlib import Path

import pytest
import torch

from tests.embedded.decode_scene import FAMILIES, random_base, tiny_config
from tests.embedded.tiny import open_store, write_tiny_model
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of the weights: each test that asks for it runs in both."""
    return request.param


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
