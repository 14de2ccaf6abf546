"""SGLang's server on a machine without a GPU: the product's entry after what a CPU lacks.

Run as a script, so that this folder (with its `sgl_kernel`) leads the module path, here and in the
processes that SGLang spawns: they import this file again.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch


def _define_torchvision_operators() -> None:
    """SGLang imports torchvision, whose CPU build for another torch defines none."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def plain(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return plain


def _ignore_pinning() -> None:
    """torch refuses to pin memory without an accelerator; SGLang's adapters ask for it always."""
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _fork() -> None:
    """SGLang spawns a scheduler and a detokenizer, which import all of it again: more than 10 s
    each on one core. Forked ones have it. $TINKERCLOUD_TEST_SPAWN leaves it as on a GPU."""
    if not os.environ.get("TINKERCLOUD_TEST_SPAWN"):
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
_define_torchvision_operators()
_ignore_pinning()
torch.set_num_threads(1)

import unembedding  # noqa: E402

from tinkercloud.cluster.sglang import entry as sglang_entry  # noqa: E402

unembedding.register()

if __name__ == "__main__":
    _fork()
    sglang_entry.main()
