"""The metrics of RL against loops over plain floats, whole and in random chunks."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.types import ForwardBackwardOutput

from tinkercloud.core.policy_metrics import policy_metrics
from tinkercloud.losses import LOSSES

RL = sorted(set(LOSSES) - {"cross_entropy"})
MEANS = ("ppo_kl:mean", "pg_clipfrac:mean", "ratio:mean", "entropy_estimate:mean")
KEYS = {*MEANS, "ratio:max", "trained_tokens:sum"}

Row = tuple[np.ndarray, dict[str, np.ndarray]]


def random_row(rng: np.random.Generator, loss: str) -> Row:
    """Prompt positions first, with placeholders; now and then a datum without any advantage."""
    length = int(rng.integers(1, 30))
    held = int(rng.integers(0, length))
    logprobs = (-rng.exponential(1.5, length)).astype(np.float32)
    inputs = {
        "logprobs": (logprobs - 0.4 * rng.normal(size=length)).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
    }
    inputs["logprobs"][:held] = 0
    inputs["advantages"][:held] = 0
    if rng.random() < 0.2:
        inputs["advantages"][:] = 0
    sampled = (np.arange(length) >= held).astype(np.float32)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = sampled
    if loss == "stable_reinforce":
        inputs["sampled_mask"] = sampled if rng.random() > 0.2 else 0 * sampled
    return logprobs, inputs


def batch(seed: int, loss: str, num: int = 23) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [random_row(rng, loss) for _ in range(num)]


def is_clipped(loss: str, r: float, a: float, config: Mapping[str, float]) -> bool:
    if loss in ("importance_sampling", "dro"):
        return False
    if loss == "stable_reinforce":
        return r > config["clip_high_threshold"]
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if loss == "cispo":
        return not low <= r <= high
    return (r > high and a > 0) or (r < low and a < 0)


def datum_reference(loss: str, row: Row) -> dict[str, float]:
    """One datum, token by token."""
    logprobs, inputs = row
    config = LOSSES[loss].defaults
    p, q = [[float(x) for x in values] for values in (logprobs, inputs["logprobs"])]
    a = [float(x) for x in inputs["advantages"]]
    chooses = [float(x) for x in inputs.get("sampled_mask", inputs["advantages"])]
    trained = [i for i, x in enumerate(chooses) if x != 0]
    if not trained:
        return dict(zip(MEANS, (0.0, 0.0, 1.0, 0.0), strict=True)) | {"max": 1.0, "num": 0.0}
    ratios = {i: math.exp(p[i] - q[i]) for i in trained}
    if loss == "gspo":
        mask = [i for i, m in enumerate(inputs["sequence_ratio_mask"]) if m != 0]
        ratios = dict.fromkeys(trained, math.exp(sum(p[i] - q[i] for i in mask) / len(mask)))
    n = len(trained)
    return {
        "ppo_kl:mean": sum(q[i] - p[i] for i in trained) / n,
        "pg_clipfrac:mean": sum(is_clipped(loss, ratios[i], a[i], config) for i in trained) / n,
        "ratio:mean": sum(ratios.values()) / n,
        "entropy_estimate:mean": -sum(p[i] for i in trained) / n,
        "max": max(ratios.values()),
        "num": float(n),
    }


def reference(loss: str, rows: list[Row]) -> dict[str, float]:
    each = [datum_reference(loss, row) for row in rows]
    means = {key: sum(datum[key] for datum in each) / len(each) for key in MEANS}
    highest = max(datum["max"] for datum in each)
    return {**means, "ratio:max": highest, "trained_tokens:sum": sum(d["num"] for d in each)}


def ours(loss: str, rows: list[Row]) -> dict[str, float]:
    return policy_metrics(loss, LOSSES[loss].defaults, rows)


def random_chunks(rows: list[Row], seed: int) -> Iterator[list[Row]]:
    rng, start = np.random.default_rng(seed), 0
    while start < len(rows):
        stop = start + int(rng.integers(1, 8))
        yield rows[start:stop]
        start = stop


def by_the_official_client(parts: list[tuple[int, dict[str, float]]]) -> Mapping[str, float]:
    """The reduction over chunks. parts: number of datums and metrics of each."""
    tensor = types.TensorData(data=[0.0], dtype="float32", shape=[1])
    outputs = [
        ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[{"logprobs": tensor}] * num,
            metrics=metrics,
        )
        for num, metrics in parts
    ]
    return combine_fwd_bwd_output_results(outputs).metrics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", RL)
def test_a_whole_batch_equals_the_loop(loss: str, seed: int) -> None:
    rows = batch(seed, loss)
    assert ours(loss, rows) == pytest.approx(reference(loss, rows), rel=1e-12, abs=1e-12)
    assert ours(loss, rows)["trained_tokens:sum"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", RL)
def test_random_chunks_reduced_by_the_official_client_equal_the_whole(loss: str, seed: int) -> None:
    rows = batch(seed, loss)
    parts = [(len(chunk), ours(loss, chunk)) for chunk in random_chunks(rows, seed)]
    assert len(parts) > 2
    reduced = by_the_official_client(parts)
    assert reduced == pytest.approx(reference(loss, rows), rel=1e-9, abs=1e-9)
    assert set(reduced) == KEYS


@pytest.mark.parametrize("loss", RL)
def test_every_key_has_exactly_one_colon_and_a_reduction(loss: str) -> None:
    assert {key.count(":") for key in ours(loss, batch(1, loss))} == {1}
    assert {key.partition(":")[2] for key in ours(loss, batch(1, loss))} == {"mean", "max", "sum"}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_no_datums_give_no_metrics(loss: str) -> None:
    assert ours(loss, []) == {}


def test_supervised_losses_have_none() -> None:
    row: Any = (np.zeros(3, np.float32), {"weights": np.ones(3, np.float32)})
    assert policy_metrics("cross_entropy", {}, [row]) == {}


@pytest.mark.parametrize("loss", RL)
def test_on_policy_nothing_is_clipped_and_the_ratio_is_one(loss: str) -> None:
    rows = batch(3, loss)
    for logprobs, inputs in rows:
        inputs["logprobs"] = logprobs.copy()
    metrics = ours(loss, rows)
    assert (metrics["ppo_kl:mean"], metrics["pg_clipfrac:mean"]) == (0, 0)
    assert (metrics["ratio:mean"], metrics["ratio:max"]) == (1, 1)


def test_a_ratio_beyond_all_numbers_is_infinite_and_no_error() -> None:
    inputs = {"logprobs": np.float32([-2000]), "advantages": np.float32([1])}
    row: Any = (np.float32([-1]), inputs)
    metrics = ours("importance_sampling", [row])
    assert metrics["ratio:max"] == math.inf
    assert metrics["ppo_kl:mean"] == -1999
