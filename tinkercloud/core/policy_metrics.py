"""What a loss of RL knows of a batch: how far policy and sampler are apart, and what it clipped.

Computed from the log-probabilities that every backend returns, so that all report alike. Each
number is one of a datum first: a `:mean` is the mean over datums of their means over trained
tokens, because clients average chunks by their numbers of datums (wire specification, section 6.3).
So any split of a batch into chunks, micro-batches and ranks gives what the whole gives.

Axes: N tokens of a datum.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.losses import LOSSES

Arrays = Mapping[str, NDArray[Any]]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _DatumMetrics:
    """Of the datum's trained tokens. The defaults are those of a datum that has none."""

    num_tokens: int = 0
    kl: float = 0.0
    clip_fraction: float = 0.0
    ratio: float = 1.0
    highest_ratio: float = 1.0
    entropy: float = 0.0


def policy_metrics(
    loss_fn: str, config: Mapping[str, float], data: Iterable[tuple[NDArray[Any], Arrays]]
) -> dict[str, float]:
    """Empty for losses without advantages and without data. Keys and definitions: docs/losses.md.

    data: of each datum the policy's log-probabilities (N,) and the loss's inputs.

    Trained are the tokens that have an advantage; for stable_reinforce, the sampled ones.
    """
    if loss_fn not in LOSSES or "advantages" not in LOSSES[loss_fn].inputs:
        return {}
    rows = [_of_datum(loss_fn, config, logprobs, inputs) for logprobs, inputs in data]
    if not rows:  # a :mean over no datums is a division by zero in clients (section 0)
        return {}
    return {
        "ppo_kl:mean": _mean(row.kl for row in rows),
        "pg_clipfrac:mean": _mean(row.clip_fraction for row in rows),
        "ratio:mean": _mean(row.ratio for row in rows),
        "ratio:max": max(row.highest_ratio for row in rows),
        "entropy_estimate:mean": _mean(row.entropy for row in rows),
        "trained_tokens:sum": float(sum(row.num_tokens for row in rows)),
    }


def is_trained(inputs: Arrays) -> NDArray[np.bool_]:
    """(N,), of the inputs of a loss with advantages."""
    return inputs.get("sampled_mask", inputs["advantages"]) != 0


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _of_datum(
    loss_fn: str, config: Mapping[str, float], logprobs: NDArray[Any], inputs: Arrays
) -> _DatumMetrics:
    trained = is_trained(inputs)
    if not trained.any():
        return _DatumMetrics()
    current = logprobs.astype(np.float64)
    difference = current - inputs["logprobs"].astype(np.float64)
    with np.errstate(over="ignore"):  # infinity is what such a ratio is
        ratio = _ratio(loss_fn, difference, inputs)[trained]
    clipped = _clipped(loss_fn, config, ratio, inputs["advantages"][trained])
    return _DatumMetrics(
        num_tokens=int(trained.sum()),
        kl=float(-difference[trained].mean()),
        clip_fraction=float(clipped.mean()),
        ratio=float(ratio.mean()),
        highest_ratio=float(ratio.max()),
        entropy=float(-current[trained].mean()),
    )


def _ratio(loss_fn: str, difference: _Floats, inputs: Arrays) -> _Floats:
    """As the loss has it (N,): by token, or one for the datum."""
    if loss_fn != "gspo":
        return np.exp(difference)
    mask = inputs["sequence_ratio_mask"] != 0
    mean = difference[mask].mean() if mask.any() else 0.0
    return np.full_like(difference, np.exp(mean))


def _clipped(
    loss_fn: str, config: Mapping[str, float], ratio: _Floats, advantages: NDArray[Any]
) -> NDArray[np.bool_]:
    """Where a bound changed the loss or its gradient. config: complete, so it has the bounds that
    the loss has."""
    if "clip_high_threshold" not in config:
        return np.zeros(ratio.shape, np.bool_)
    if "clip_low_threshold" not in config:
        return ratio > config["clip_high_threshold"]
    bounded = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return ratio != bounded
    return ratio * advantages > bounded * advantages
