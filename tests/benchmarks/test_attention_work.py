"""What benchmarks count for attention, against PyTorch's counter of operations."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lib.attention_work import FORWARD, TRAINING, attention_flop, num_pairs
from benchmarks.peers.sampling_bench import Case
from tests.architectures.networks import random_network
from tinkercloud.architectures.config import from_hf


def test_pairs_are_those_that_a_causal_mask_leaves() -> None:
    mask = torch.ones(12, 12).tril()
    assert num_pairs(12) == mask.sum()
    assert num_pairs(12, after=5) == mask[5:].sum()


def test_a_pair_has_the_operations_that_pytorch_counts() -> None:
    config = from_hf(random_network("Llama").config.to_dict() | {"num_hidden_layers": 1})
    length = 6
    shape = (1, config.num_heads, length, config.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        mixed = (q @ k.mT).softmax(-1) @ v
        assert counter.get_total_flops() == attention_flop(config, [length**2], FORWARD)
        mixed.sum().backward()
    assert counter.get_total_flops() == attention_flop(config, [length**2], TRAINING)


def test_a_load_has_the_pairs_of_its_prompts_and_of_each_sample() -> None:
    case = Case(prompt_tokens=5, num_prompts=2, num_samples=3, max_tokens=4)
    assert case.num_pairs == 2 * num_pairs(5) + 6 * (6 + 7 + 8 + 9)
