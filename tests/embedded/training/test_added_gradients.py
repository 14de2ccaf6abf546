"""The gradient that calls accumulate is that of one call with all their datums."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.tiny import TinyStore, grads, open_store, supervised, train
from tinkercloud.core.types import AdamParams, Datum, LoraSpec
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (70, 5, 33, 17, 128, 40)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def store(request: pytest.FixtureRequest, folder: Path) -> TinyStore:
    return open_store(folder, dtype=request.param)


def data_of(shared: int) -> list[Datum]:
    """Datums whose first tokens, as many of them as there are, are the same."""
    data = [supervised(length, length) for length in LENGTHS]
    beginning = supervised(shared, 0).tokens
    for i, each in enumerate(data):
        tokens = np.concatenate([beginning, each.tokens])[: len(each.tokens)]
        data[i] = replace(each, tokens=tokens)
    return data


def gradient(store: TinyStore, calls: Sequence[Sequence[Datum]]) -> dict[str, torch.Tensor]:
    store.model("m").grads = {}
    for data in calls:
        train(store, "m", list(data))
    return grads(store, "m")


def distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """Of the whole gradients, relative to the norm of b."""
    assert a.keys() == b.keys()
    apart = sum(float((a[name] - b[name]).double().square().sum()) for name in b)
    return (apart / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize(("shared", "limit"), [(0, 1e-5), (32, 3e-3)])
def test_two_calls_add_up_to_the_gradient_of_one_with_all_datums(
    store: TinyStore, shared: int, limit: float, rank: int
) -> None:
    """A prefix that both calls have is computed once in the one call: its gradients are then summed
    before they are rounded for products."""
    store.create_model("m", "tiny", LoraSpec(rank=rank, seed=1))
    train(store, "m", [supervised(20, 1)])
    store.optim_step("m", AdamParams(learning_rate=0.01))  # B leaves zero, where A has no gradient
    data = data_of(shared)
    together = gradient(store, [data])
    for first in (1, 3):
        assert distance(gradient(store, [data[:first], data[first:]]), together) < limit
