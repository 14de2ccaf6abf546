"""Whether our Triton kernels can be used on a device: they compile there and are right there.

Before the first use every kernel is compared with its plain form on the device itself. Kernels that
do not compile or do not agree are not used; the work is slower then, and a warning says why.
"""

import logging
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import product
from weakref import ref

import torch
from torch import Tensor

from tinkercloud.architectures import load_architecture
from tinkercloud.architectures.config import from_hf
from tinkercloud.architectures.llama import Llama
from tinkercloud.embedded.forward.adapter_bank import NO_ADAPTER, AdapterBank
from tinkercloud.embedded.forward.decode_step import HEAD, DecodeModel, Step
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool
from tinkercloud.embedded.forward.paged_attention import PagedAttention, paged_attention
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.weights.adapters import Adapter

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 1e-2}
"""Of differences, as a fraction of the largest entry."""
_BLOCKS = 24
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 72,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 4096,
}


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether those of sampling run on the device and agree with the plain forms there."""
    return are_usable("sampling", device, dtype, differences)


def are_usable(
    work: str,
    device: torch.device,
    dtype: torch.dtype,
    find_differences: Callable[[torch.device, torch.dtype], dict[str, float]],
) -> bool:
    """Whether the kernels of some work run on the device and agree with the plain forms there.
    find_differences: compiles and compares them, by name, as `differences` does."""
    if device.type != "cuda" or dtype not in TOLERANCES or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):  # below, no products of bfloat16
        return False
    start = time.perf_counter()
    try:
        largest = find_differences(device, dtype)
    except Exception as error:  # noqa: BLE001 - any error of a compiler; the plain form computes
        logger.warning("Triton kernels are not used, %s is slower: %s", work, error)
        return False
    # `not <=`, since a difference may be NaN.
    wrong = {name: value for name, value in largest.items() if not value <= TOLERANCES[dtype]}
    if wrong:
        logger.warning("Triton kernels are not used, %s is slower; they are off: %s", work, wrong)
        return False
    duration_ms = (time.perf_counter() - start) * 1000
    logger.info(
        "Triton kernels of %s for %s compiled and compared in %.0f ms", work, dtype, duration_ms
    )
    return True


def attention_for(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The fastest on the device."""
    if has_kernels(device, dtype):
        from tinkercloud.embedded.forward.attention_kernel import paged_attention as compiled

        return compiled
    return paged_attention


def step_for(version: Version, pool: BlockPool) -> Step:
    """The fastest decode step of the version's weights."""
    base = version.base
    if base.is_llama_family and base.config.is_plain and has_kernels(base.device, base.dtype):
        from tinkercloud.embedded.forward.fused_decode import FusedModel

        return FusedModel(base.architecture, version.weights, ref(pool))
    attend = attention_for(base.device, base.dtype)
    return DecodeModel(base.architecture, version.weights, ref(pool), attend)


def differences(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Between our kernels and the plain forms: the largest, as a fraction of the largest entry."""
    generator = torch.Generator().manual_seed(3)
    return attention_differences(device, dtype) | _step_differences(device, dtype, generator)


def attention_differences(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    generator, largest = torch.Generator().manual_seed(4), {}
    for num_seqs, width in ((1, 8), (3, 24)):
        name = f"attention of {num_seqs} over {width} blocks"
        largest[name] = _attention_difference(num_seqs, width, device, dtype, generator)
    return largest


def _attention_difference(
    num_seqs: int, width: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> float:
    from tinkercloud.embedded.forward.attention_kernel import paged_attention as compiled

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, keys = random(num_seqs, 6, 24), random(_BLOCKS, 2, 24, BLOCK_TOKENS)
    values = random(_BLOCKS, 2, BLOCK_TOKENS, 24)
    order = torch.stack([torch.randperm(_BLOCKS, generator=generator) for _ in range(num_seqs)])
    tables = order[:, :width].int().to(device)
    lengths = torch.tensor([width * BLOCK_TOKENS - 7, 1, 65][:num_seqs], device=device)
    inputs = (q, keys, values, tables, lengths)
    return _difference(compiled(*inputs), paged_attention(*inputs))


def _step_differences(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, float]:
    """Of logits, keys and values of steps of one row and of several, without and with adapters."""
    from tinkercloud.embedded.forward.fused_decode import FusedModel

    base = _tiny_base(device, dtype, generator)
    bank = AdapterBank(base.config.linear_shapes(), device)
    slots = bank.place([_adapted(base, rank, generator) for rank in (4, 11)])
    assert slots is not None
    rows = torch.zeros(3, HEAD + 8, dtype=torch.int32, device=device)
    rows[:, 0] = torch.tensor([5, 6, 70])
    rows[:, 1] = torch.tensor([0, 100, 17])
    rows[:, 2] = torch.tensor([slots[0], NO_ADAPTER, slots[1]])
    rows[:, HEAD:] = torch.arange(_BLOCKS).view(3, 8)
    largest = {}
    for adapters, packed in product((None, bank), (rows, rows[2:])):
        name = f"step of {len(packed)}, {'with' if adapters else 'without'} adapters"
        results = []
        for kind in ("ours", "plain"):
            pool = BlockPool(base.config, dtype, device, _BLOCKS)
            model: Step = FusedModel(base.architecture, base.weights, ref(pool))
            if kind == "plain":
                model = DecodeModel(base.architecture, base.weights, ref(pool), paged_attention)
            out = torch.zeros(len(packed), base.config.vocab_size, device=device, dtype=dtype)
            model.step(packed, adapters, out)
            results.append((out, *pool.keys, *pool.values))
        pairs = zip(*results, strict=True)
        largest[name] = max(_difference(ours, theirs) for ours, theirs in pairs)
    return largest


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _tiny_base(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> BaseModel:
    config = from_hf(_TINY)
    weights = {}
    for name, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        weights[name] = (noise * scale + ("norm" in name)).to(device, dtype)
    network: Llama = load_architecture(config.name)(config, device)
    return BaseModel("kernel check", config, network, weights, None, dtype, device)


def _adapted(base: BaseModel, rank: int, generator: torch.Generator) -> Version:
    adapter: Adapter = {}
    for name, (out_size, in_size) in base.config.linear_shapes().items():
        a = torch.randn(rank, in_size, generator=generator) * in_size**-0.5
        b = torch.randn(out_size, rank, generator=generator) * rank**-0.5
        adapter[name] = (a.to(base.device), b.to(base.device))
    return Version(f"rank {rank}", base, base.weights, adapter, 0.5)
