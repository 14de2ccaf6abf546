"""Megatron-core 0.16.1 without CUDA: what it asks of `torch.cuda`, answered on the CPU.

Two layers. A function mode turns `device="cuda"`, `.cuda()` and pinned memory into plain CPU
memory; it is thread-local, so `install` runs in the thread that computes. Attribute patches answer
the handful of `torch.cuda` calls that are no torch functions: streams, events, random state.
"""

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron keys gradient buffers by "torch.cuda.FloatTensor".
            name = func(*args)
            return name.replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """Work on a CPU is done when the call returns, so there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass


class _Event(_Stream):
    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


_installed: list[_OnCpu] = []


def install() -> None:
    """Once per process, in the thread that computes, before a Megatron object is made."""
    if torch.cuda.is_available() or _installed:
        return
    _patch_torch()
    _patch_megatron()
    mode = _OnCpu()
    mode.__enter__()  # never left: the process is a rank from here on
    _installed.append(mode)


def _patch_torch() -> None:
    stream = _Stream()
    answers = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # 0.16.1 names it without importing it when Transformer Engine is missing.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # It asks whether a linear is Transformer Engine's; without that package the name is no class.
    for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    token_dispatcher.maybe_move_tensor_to_cpu = _as_it_is


def _as_it_is(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
