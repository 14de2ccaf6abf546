"""Inside SGLang: keeps digests of the weights that arrive, and tells them to its weights checker.

One process holds one rank of one engine, so what arrived is the process's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tinkercloud.cluster.weights.tensor_digest import tensor_digest

RECEIVED = "tinkercloud_received"

_arrived: dict[str, str] = {}


def forget(original: Callable[..., None], updater: Any) -> None:
    """WeightUpdater.begin_weight_update."""
    _arrived.clear()
    original(updater)


def note_tensors(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """WeightUpdater.update_weights_from_tensor."""
    _note(named_tensors)
    return original(updater, named_tensors=named_tensors, load_format=load_format)


def note_broadcast(original: Callable[..., Any], updater: Any, named_tensors: Any) -> Any:
    """WeightUpdater.load_weights_from_distributed."""
    _note(named_tensors)
    return original(updater, named_tensors)


def tell(original: Callable[..., Any], runner: Any, action: str, **more: Any) -> Any:
    """ModelRunner.check_weights."""
    if action != RECEIVED:
        return original(runner, action, **more)
    # Of the checker's own answer only who answers is of use: every name holds the empty text.
    answer = original(runner, "checksum", **{**more, "skip_tensor_list": [""]})
    return {**answer, "checksums": dict(_arrived)}


def _note(named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    _arrived.update((name, tensor_digest(tensor)) for name, tensor in named_tensors)
