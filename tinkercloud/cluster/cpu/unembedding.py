"""Adapters of the unembedding in SGLang's adapter arithmetic for CPUs.

A prefill unembeds only the rows that somebody asks about. SGLang's kernels for GPUs are told which
adapter each of these rows belongs to; its plain-torch arithmetic is told too, but takes the whole
prompt's rows instead, and so mixes requests up. These hooks make it listen.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.lora.utils import get_lm_head_pruned_lens
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_BACKEND = "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend"


def register() -> None:
    hooks = {
        "prepare_lora_batch": prepare,
        "run_lora_a_sgemm": with_rows_of_the_call,
        "run_lora_b_sgemm": with_rows_of_the_call,
    }
    for method, hook in hooks.items():
        HookRegistry.register(f"{_BACKEND}.{method}", hook, HookType.AROUND)


def prepare(
    original: Callable[..., None],
    backend: Any,
    forward_batch: Any,
    weight_indices: list[int],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Sets the backend's `lm_head_batch_info`: rows and adapter of each prompt as the unembedding
    has them; None where it has all rows."""
    original(backend, forward_batch, weight_indices, *args, **kwargs)
    lengths = get_lm_head_pruned_lens(forward_batch)
    backend.lm_head_batch_info = None
    if lengths is not None:
        backend.lm_head_batch_info = dataclasses.replace(
            backend.batch_info,
            seg_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            weight_indices_cpu=torch.tensor(weight_indices, dtype=torch.int32),
            expected_tokens=sum(lengths),
        )


def with_rows_of_the_call(
    original: Callable[..., torch.Tensor], backend: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A product by adapters, over the rows that the call names instead of the whole batch's."""
    rows = kwargs.pop("pruned_batch_info", None)
    whole = backend.batch_info
    backend.batch_info = whole if rows is None else rows
    try:
        return original(backend, *args, **kwargs)
    finally:
        backend.batch_info = whole
