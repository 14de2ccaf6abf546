"""Weights that are held packed: the same tensors, and no second copy of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.embedded.model.one_copy import Memory, num_held, write_model
from tinkercloud.embedded.model.packed_tensors import PackedTensors
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

ROOT = Path(__file__).resolve().parents[3]
SHAPES = {
    "model.embed_tokens": (75, 70),
    "model.norm": (70,),
    "model.layers.0.self_attn.q_proj": (33, 70),
    "model.layers.0.self_attn.q_proj.bias": (33,),
}


@pytest.fixture
def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def assert_same(packed: PackedTensors, tensors: dict[str, Tensor]) -> None:
    """A tied unembedding besides."""
    assert set(packed) == {*tensors, "lm_head"}
    for name, tensor in tensors.items():
        assert packed[name].dtype == tensor.dtype
        assert torch.equal(packed[name], tensor), name
    assert torch.equal(packed["lm_head"], tensors["model.embed_tokens"])


def test_what_is_read_are_the_tensors(tensors: dict[str, Tensor]) -> None:
    packed = PackedTensors.of(tensors.items())
    assert_same(packed, tensors)
    assert "model.layers.0.self_attn.k_proj.bias" not in packed
    assert packed.get("model.layers.0.self_attn.k_proj.bias") is None
    with pytest.raises(KeyError):
        packed["model.layers.1.self_attn.q_proj"]


def test_a_matrix_that_was_read_is_a_copy(tensors: dict[str, Tensor]) -> None:
    packed = PackedTensors.of(tensors.items())
    packed["model.embed_tokens"].zero_()
    assert_same(packed, tensors)


def test_a_tied_unembedding_takes_no_memory(tensors: dict[str, Tensor]) -> None:
    tied = PackedTensors.of(tensors.items())
    own = PackedTensors.of([*tensors.items(), ("lm_head", tensors["model.embed_tokens"])])
    matrices = tied.packed.matrices
    assert matrices["lm_head"] is matrices["model.embed_tokens"]
    assert own.nbytes == tied.nbytes + matrices["lm_head"].packed.nbytes


def test_rows_are_those_of_the_whole_matrix(tensors: dict[str, Tensor]) -> None:
    packed = PackedTensors.of(tensors.items())
    ids = torch.tensor([[0, 74, 16], [15, 31, 74]])
    found = packed.rows("model.embed_tokens", ids)
    assert torch.equal(found, tensors["model.embed_tokens"][ids])
    assert packed.rows("model.embed_tokens", ids[:0]).shape == (0, 3, 70)


def test_what_was_restored_of_a_state_is_the_same(tensors: dict[str, Tensor]) -> None:
    packed = PackedTensors.of(tensors.items())
    state = {name: held.clone() for name, held in packed.state().items()}
    restored = PackedTensors.restored(state, SHAPES)
    for held in state.values():
        held.zero_()
    assert_same(restored, tensors)
    assert restored.nbytes == packed.nbytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no Linux")
def test_one_copy_of_the_weights_is_in_memory_while_they_load_sample_and_train(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """In a process of its own: what others have freed would hide what is allocated."""
    write_model(tmp_path)
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "tests.embedded.model.one_copy", str(tmp_path), name]
    child = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    memory = Memory(**json.loads(child.stdout.splitlines()[-1]))
    assert memory.copy_bytes == num_held(dtype) * dtype.itemsize
    # Besides the copy: the largest matrix, which is a fifth, and of what was freed up to 64 MB that
    # the C library keeps to use again until all is loaded.
    assert memory.loading_bytes < 1.25 * memory.copy_bytes + 64 * 2**20, memory
    assert 0.95 * memory.copy_bytes < memory.loaded_bytes < 1.1 * memory.copy_bytes, memory
    assert memory.used_bytes < 1.4 * memory.copy_bytes, memory
