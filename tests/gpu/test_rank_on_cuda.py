"""Megatron-core with Transformer Engine on one GPU, against the embedded backend there."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.cluster.cpu import spawn
from tests.cluster.cpu.tiny import write_model
from tests.cluster.plans import tiny_plan
from tests.gpu import bodies

HAS_TE = importlib.util.find_spec("transformer_engine") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
def test_a_rank_trains_as_the_embedded_backend_and_frees_what_it_offloads(folder: Path):
    torch.backends.cuda.matmul.allow_tf32 = False
    (found,) = spawn.run(bodies.trained, 1, folder, tiny_plan(folder, 1), None)
    bodies.compare(found, bodies.embedded(folder, "cuda"))
    assert found.device_freed_bytes >= 0.95 * found.freed_bytes


@pytest.mark.skipif(HAS_TE, reason="Transformer Engine is installed")
def test_without_transformer_engine_a_rank_says_what_to_install(folder: Path):
    with pytest.raises(AssertionError, match="transformer-engine"):
        spawn.run(bodies.trained, 1, folder, tiny_plan(folder, 1), None)
