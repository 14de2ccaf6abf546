"""A tiny target for heads: the sizes, the frozen rows, and hidden states at random."""

import torch
from torch import Tensor

from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.speculative.head.cache import HeadCache, NewRows, extend
from tinkercloud.speculative.head.head import FrozenRows, Head, HeadConfig, Params, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary

V, D = 61, 32


def target_config(**more: object) -> ArchitectureConfig:
    sizes = {
        "name": "LlamaForCausalLM", "model_type": "llama", "vocab_size": V, "hidden_size": D,
        "intermediate_size": 48, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": False,
        "output_bias": False, "mlp_bias": False, "qk_norm": False, "eos_token_ids": (0,),
        "bos_token_id": None,
    }  # fmt: skip
    return ArchitectureConfig(**sizes | more)


def target_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens": torch.randn(V, D, generator=generator),
        "lm_head": torch.randn(V, D, generator=generator),
    }


def a_head(layers: tuple[int, ...] | None = None, seed: int = 0) -> tuple[Head, dict[str, Tensor]]:
    """A head that can say every second token, and parameters that leave nothing at its start."""
    config = HeadConfig.of(target_config(), layers)
    vocabulary = DraftVocabulary.of(range(0, V, 2), V)
    head = Head(config, FrozenRows.of(target_weights(), vocabulary))
    params = initial_params(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for tensor in params.values():
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return head, params


def sequences(num: int, length: int, layers: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """hidden (num, length, layers, D), tokens (num, length)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, length, layers, D, generator=generator)
    return hidden, torch.randint(0, V, (num, length), generator=generator)


def drafted_outputs(
    head: Head, params: Params, sequence: tuple[Tensor, Tensor], begin: int, steps: int
) -> list[Tensor]:
    """The slow reference: one draft of one sequence, row by row, told its hidden states (N, L, D)
    and tokens (N,)."""
    hidden, tokens = sequence
    cache = HeadCache(head, 1)
    feature = head.fuse(params, hidden)
    for i in range(begin + 1):
        output = extend(head, params, cache, NewRows([0], feature[None, i : i + 1],
                                                     tokens[None, i : i + 1], [1]))  # fmt: skip
    outputs = [output[0, 0]]
    for i in range(begin + 1, begin + steps):
        output = extend(head, params, cache, NewRows([0], output, tokens[None, i : i + 1], [1]))
        outputs.append(output[0, 0])
    return outputs
