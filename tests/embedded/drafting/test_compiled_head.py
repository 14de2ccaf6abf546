"""The draft head on the compiled pass's products against the one on torch."""

from pathlib import Path

import pytest
import torch

from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import open_store
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.speculative.drafters.drafter import Draft, Stream

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
DEPTH = 3


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


def drafts(drafter: HeadDrafter, temperature: float) -> list[Draft]:
    """Of twenty samples at once, whose states are the same for every drafter."""
    target, generator = drafter.head.config.target, torch.Generator().manual_seed(0)
    streams = []
    for i in range(20):
        tokens = torch.randint(0, 200, (9 + i,), generator=generator).tolist()
        params = SamplingParams(None, i, temperature)
        stream = Stream(i, None, "v", 0, tokens, 5, params, 0)
        drafter.begin(stream)
        shape = (len(tokens) - 1, len(drafter.layers), target.hidden_size)
        drafter.observe_hidden(stream, 0, torch.randn(shape, generator=generator))
        streams.append(stream)
    found = drafter.propose([(stream, DEPTH) for stream in streams])
    for stream in streams:
        drafter.end(stream)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_drafts_what_the_head_on_torch_drafts_but_for_rounding(
    base: BaseModel, temperature: float
) -> None:
    head, params = untaught_head(base)
    compiled = HeadDrafter(head, params, product=NativeRunner(1).product)
    same = 0
    plain = drafts(HeadDrafter(head, params), temperature)
    for one, other in zip(drafts(compiled, temperature), plain, strict=True):
        assert len(one.tokens) == len(other.tokens) == DEPTH
        same += one.tokens == other.tokens
        if one.tokens[0] == other.tokens[0]:
            assert one.confidences[0] == pytest.approx(other.confidences[0], rel=0.1)
    assert same >= 17


def test_new_parameters_are_drafted_with_at_once(base: BaseModel) -> None:
    head, params = untaught_head(base)
    generator = torch.Generator().manual_seed(1)
    others = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in params.items()}
    drafter = HeadDrafter(head, params, product=NativeRunner(1).product)
    before = drafts(drafter, 0.0)
    drafter.use(others)
    after = [draft.tokens for draft in drafts(drafter, 0.0)]
    assert after != [draft.tokens for draft in before]
    fresh = HeadDrafter(head, others, product=NativeRunner(1).product)
    assert after == [draft.tokens for draft in drafts(fresh, 0.0)]
