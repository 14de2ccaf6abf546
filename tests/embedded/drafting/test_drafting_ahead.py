"""Drafts for what may come are those that are made when it has come."""

from pathlib import Path

import pytest
import torch

from tests.embedded.drafting.test_catching_up import model_drafter
from tests.embedded.tiny import open_store
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.speculative.drafters.drafter import Stream

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
LENGTHS = (5, 16, 40)  # in tokens: inside a block, and at the end of one


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


def streams() -> list[Stream]:
    generator = torch.Generator().manual_seed(0)
    return [
        Stream(
            i, None, "v", 0, torch.randint(0, 200, (length,), generator=generator).tolist(), 2,
            SamplingParams(None, i, 1.0), 0,
        )
        for i, length in enumerate(LENGTHS)
    ]  # fmt: skip


def never() -> bool:
    return False


def test_drafts_ahead_are_those_made_later(base: BaseModel) -> None:
    ahead = model_drafter(base)
    assert isinstance(ahead, ModelDrafter)
    ahead = ModelDrafter(ahead.version, ahead._runner, ahead._pool, with_seconds=True)
    num_available = ahead._pool.num_available
    ones = streams()
    for one in ones:
        ahead.begin(one)
    drafts = ahead.propose([(one, 4) for one in ones])
    requests = []
    for one, draft in zip(ones, drafts, strict=True):
        requests.append((one, draft.tokens, 5))
        requests += [(one, (*draft.tokens[:i], draft.seconds[i]), 4) for i in range(4)]
    prepared = ahead.propose_after(requests, never)
    assert prepared is not None
    for (one, after, most), draft in zip(requests, prepared, strict=True):
        later = model_drafter(base)
        grown = streams()[one.id]
        grown.tokens.extend(after)
        later.begin(grown)
        (expected,) = later.propose([(grown, most)])
        assert draft.tokens == expected.tokens
        assert len(draft.seconds) == most
        assert all(a != b for a, b in zip(draft.tokens, draft.seconds, strict=True))
    for one in ones:
        ahead.end(one)
    assert ahead._pool.num_available == num_available


def test_it_ends_between_two_passes_and_leaves_no_trace(base: BaseModel) -> None:
    drafter = model_drafter(base)
    assert isinstance(drafter, ModelDrafter)
    one = streams()[2]
    drafter.begin(one)
    (before,) = drafter.propose([(one, 4)])
    num_available = drafter._pool.num_available
    passes = 0

    def is_stale() -> bool:
        nonlocal passes
        passes += 1
        return passes == 2

    requests = [(one, before.tokens, 30), (one, (7,), 30), (one, (8,), 30)]
    assert drafter.propose_after(requests, is_stale) is None
    assert passes == 2
    own = len(drafter._caches[one.id].blocks)
    assert drafter._pool.num_available == drafter._pool.num_blocks - own <= num_available
    assert set(drafter._caches) == {one.id}
    (again,) = drafter.propose([(one, 4)])
    assert again.tokens == before.tokens
