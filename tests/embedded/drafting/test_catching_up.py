"""What a drafter reads before it is asked changes no draft."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import open_store
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.drafting.compiled_head import CompiledHead
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
LENGTHS = (3, 40, 70)  # in tokens; a short one has nothing to catch up with


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


def head_drafter(base: BaseModel) -> Drafter:
    return HeadDrafter(CompiledHead(*untaught_head(base), base, NativeRunner(1).team))


def model_drafter(base: BaseModel) -> Drafter:
    pool = BlockPool(base.config, base.dtype, base.device, 100)
    return ModelDrafter(Version("d", base, base.weights, None, 1.0), NativeRunner(1), pool)


def drafts(drafter: Drafter, base: BaseModel, *, ahead: bool) -> list[list[Draft]]:
    """Of two rounds, with a new token between them. ahead: they catch up before each."""
    generator = torch.Generator().manual_seed(0)
    streams, states = [], []
    for i, length in enumerate(LENGTHS):
        tokens = torch.randint(0, 200, (length,), generator=generator).tolist()
        streams.append(Stream(i, None, "v", 0, tokens, 2, SamplingParams(None, i, 1.0), 0))
        drafter.begin(streams[-1])
        shape = (length, len(drafter.layers), base.config.hidden_size)
        states.append(torch.randn(shape, generator=generator))
        drafter.observe_hidden(streams[-1], 0, states[-1][:-1])
    rounds = []
    for _ in range(2):
        if ahead:
            drafter.catch_up(streams)
        rounds.append(drafter.propose([(stream, 3) for stream in streams]))
        for stream, state in zip(streams, states, strict=True):
            drafter.observe_hidden(stream, len(stream.tokens) - 1, state[-1:])
            stream.tokens.append(7)
            drafter.observe(stream, 1)
    return rounds


@pytest.mark.parametrize("make", [head_drafter, model_drafter])
def test_drafts_are_the_same(base: BaseModel, make: Callable[[BaseModel], Drafter]) -> None:
    late, early = (drafts(make(base), base, ahead=ahead) for ahead in (False, True))
    for one, other in zip(late, early, strict=True):
        assert [draft.tokens for draft in one] == [draft.tokens for draft in other]
        assert all(len(draft.tokens) == 3 for draft in one)
