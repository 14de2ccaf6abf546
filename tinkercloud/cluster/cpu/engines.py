"""What makes SGLang's server run without a GPU: before it is imported, in each of its processes."""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import functools
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tinkercloud.cluster.cpu.presence import refuse_cuda

KERNELS = Path(__file__).with_name("kernels")  # where `sgl_kernel` is imported from


def install() -> None:
    """Raises ConfigError where there is a GPU."""
    refuse_cuda()
    sys.path.insert(0, str(KERNELS))
    _define_torchvision_operators()
    _ignore_pinning()
    torch.set_num_threads(1)


def fork() -> None:
    """SGLang spawns a scheduler and a detokenizer, which import all of it again: more than 10 s
    each on one core. Forked ones have it."""
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


def _define_torchvision_operators() -> None:
    """SGLang imports torchvision, whose CPU build for another torch defines none."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def _ignore_pinning() -> None:
    """torch refuses to pin memory without an accelerator; SGLang's adapters ask for it always."""
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def plain(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return plain
