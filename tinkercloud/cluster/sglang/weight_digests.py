"""Inside SGLang: records digests of the weights that arrive; its weights checker reports them.

A process holds one rank of one engine, so what arrives in it belongs to that rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tinkercloud.cluster.weights.tensor_digest import tensor_digest

RECEIVED = "tinkercloud_received"

_received: dict[str, str] = {}


def clear(original: Callable[..., None], updater: Any) -> None:
    """WeightUpdater.begin_weight_update."""
    _received.clear()
    original(updater)


def record_tensors(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """WeightUpdater.update_weights_from_tensor."""
    _record(named_tensors)
    return original(updater, named_tensors=named_tensors, load_format=load_format)


def record_broadcast(original: Callable[..., Any], updater: Any, named_tensors: Any) -> Any:
    """WeightUpdater.load_weights_from_distributed."""
    _record(named_tensors)
    return original(updater, named_tensors)


def report(original: Callable[..., Any], runner: Any, action: str, **more: Any) -> Any:
    """ModelRunner.check_weights."""
    if action != RECEIVED:
        return original(runner, action, **more)
    # SGLang's checker is called for who answers (its rank) only: every name contains the empty
    # text, so that it skips all tensors.
    answer = original(runner, "checksum", **{**more, "skip_tensor_list": [""]})
    return {**answer, "checksums": dict(_received)}


def _record(named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    _received.update((name, tensor_digest(tensor)) for name, tensor in named_tensors)
