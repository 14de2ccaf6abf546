"""What keys and values take of the machine's memory."""

import sys

import numpy as np
import pytest
import torch

from tests.embedded.decode_scene import tiny_config
from tinkercloud.embedded.forward.kv_blocks import LINE_BYTES, BlockPool, KVLayout
from tinkercloud.embedded.process.phase_memory import resident_bytes

MIB = 2**20


def pool_of(num_bytes: int) -> BlockPool:
    """Plain float32 keys and values of that many bytes in all."""
    config, dtype = tiny_config("Llama", num_layers=4), torch.float32
    blocks = num_bytes // BlockPool.bytes_per_block(config, dtype)
    return BlockPool(config, dtype, torch.device("cpu"), blocks)


def tensors_of(pool: BlockPool) -> list[torch.Tensor]:
    return [*pool.keys, *pool.values]


def write(pool: BlockPool) -> None:
    for tensor in tensors_of(pool):
        tensor.fill_(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's count of pages")
def test_a_pool_after_others_takes_memory_only_as_it_is_written_and_gives_it_back():
    """What malloc has back, of another size, it would give again as zeros that it has to write."""
    behind: list[np.ndarray] = []  # what is still used, so that malloc gives nothing back
    for num_bytes in (128 * MIB, 64 * MIB, 64 * MIB):
        pool = pool_of(num_bytes)
        behind.append(np.ones(MIB // 64))
        write(pool)
        del pool
    before = resident_bytes()
    pool = pool_of(64 * MIB)
    assert resident_bytes() - before < 8 * MIB
    write(pool)
    assert resident_bytes() - before > 56 * MIB
    del pool
    assert resident_bytes() - before < 8 * MIB


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_zeros_of_their_own_that_begin_with_a_cache_line(
    layout: KVLayout, dtype: torch.dtype
):
    config = tiny_config("Llama")
    pool = BlockPool(config, dtype, torch.device("cpu"), 3, layout)
    tensors = tensors_of(pool)
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % LINE_BYTES == 0
        assert not tensor.any()
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number + 1).all()
    shapes = layout.shapes(config.num_kv_heads, config.head_dim)
    assert [tuple(t.shape) for t in (pool.keys[0], pool.values[0])] == [(3, *s) for s in shapes]
