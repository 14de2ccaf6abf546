"""The two functions of SGLang's kernel package that a dense model calls on a CPU, in torch.

The package's CPU build has no wheel. Every other name exists and raises when it is called, so that
SGLang's imports succeed and a wrong path fails loudly.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """table[row, start:end] = the next (end - start) slots, request by request."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """The reverse: the slots of table[row, start:end], request by request."""
    filled = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[filled : filled + end - start] = table[row, start:end]
        filled += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

    return missing
