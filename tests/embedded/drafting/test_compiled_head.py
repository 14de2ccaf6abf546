"""The draft head on the compiled pass against the one on torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import VOCAB, open_store
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.drafting import compiled_head
from tinkercloud.embedded.drafting.compiled_head import CompiledHead
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import HeadNetwork, TorchHead
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.speculative.drafters.drafter import Draft, Stream
from tinkercloud.speculative.head.head import Head, Params

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
DEPTH = 3
NUM_SAMPLES = 20


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def base(folder: Path, request: pytest.FixtureRequest) -> BaseModel:
    return open_store(folder, dtype=request.param).base("tiny")


@pytest.fixture(params=[None, range(3, VOCAB, 2)], ids=["all tokens", "every second token"])
def head(base: BaseModel, request: pytest.FixtureRequest) -> tuple[Head, Params]:
    return untaught_head(base, request.param)


def compiled(base: BaseModel, head: tuple[Head, Params], num_threads: int = 1) -> CompiledHead:
    return CompiledHead(*head, base, NativeRunner(num_threads).team)


def begun(drafter: HeadDrafter, params: Sequence[SamplingParams]) -> list[Stream]:
    """Samples whose states are the same for every drafter."""
    hidden, generator = drafter.head.config.target.hidden_size, torch.Generator().manual_seed(0)
    streams = []
    for i, each in enumerate(params):
        tokens = torch.randint(0, 200, (9 + i,), generator=generator).tolist()
        streams.append(Stream(i, None, "v", 0, tokens, 5, each, 0))
        drafter.begin(streams[-1])
        shape = (len(tokens) - 1, len(drafter.layers), hidden)
        drafter.observe_hidden(streams[-1], 0, torch.randn(shape, generator=generator))
    return streams


def drafts(
    network: HeadNetwork, params: Sequence[SamplingParams], depth: Callable[[int], int],
    audit_every: int = 10**6,
) -> list[Draft]:  # fmt: skip
    """depth: of each sample's draft."""
    drafter = HeadDrafter(network, audit_every)
    streams = begun(drafter, params)
    found = drafter.propose([(stream, depth(stream.id)) for stream in streams])
    for stream in streams:
        drafter.end(stream)
    return found


def asked(**more: float) -> list[SamplingParams]:
    return [replace(SamplingParams(None, i), **more) for i in range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    "more", [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"top_p": 0.8, "top_k": 30}], ids=str
)
def test_it_drafts_what_the_head_on_torch_drafts_but_for_rounding(
    base: BaseModel, head: tuple[Head, Params], more: dict[str, float]
) -> None:
    params = asked(**more)
    plain = drafts(TorchHead(*head), params, lambda _: DEPTH)
    same = 0
    for one, other in zip(
        drafts(compiled(base, head), params, lambda _: DEPTH), plain, strict=True
    ):
        assert len(one.tokens) == len(other.tokens) == DEPTH
        same += one.tokens == other.tokens
        if one.tokens[0] == other.tokens[0]:
            assert one.confidences[0] == pytest.approx(other.confidences[0], abs=0.1)
    assert same >= NUM_SAMPLES - 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_chains_in_one_call_are_those_that_are_drawn_from_logits(
    base: BaseModel, head: tuple[Head, Params], temperature: float
) -> None:
    """Audited ones are drawn so, token by token: where the logits are the same bits, so are the
    tokens."""
    params = asked(temperature=temperature)

    def depth(sample: int) -> int:
        return 1 + sample % 5

    at_once = drafts(compiled(base, head, 2), params, depth)
    audited = drafts(compiled(base, head, 2), params, depth, audit_every=1)
    for i, (one, other) in enumerate(zip(at_once, audited, strict=True)):
        assert len(one.tokens) == depth(i)
        assert one.tokens == other.tokens
        assert one.confidences == pytest.approx(other.confidences, abs=1e-3)
        assert one.distributions == ()
        assert len(other.distributions) == (depth(i) if temperature else 0)
        for token, distribution in zip(other.tokens, other.distributions, strict=False):
            assert distribution.can_give(token, VOCAB)


def test_a_token_that_is_unsure_is_the_last_of_its_chain(
    base: BaseModel, head: tuple[Head, Params]
) -> None:
    drafter = HeadDrafter(compiled(base, head), 10**6)
    requests = [(stream, 6) for stream in begun(drafter, asked())]
    whole = drafter.propose(requests)
    drafter.unsure_below = 0.5
    for one, other in zip(drafter.propose(requests), whole, strict=True):
        unsure = [i for i, confidence in enumerate(other.confidences) if confidence < 0.5]
        assert one.tokens == other.tokens[: unsure[0] + 1 if unsure else 6]
    assert {len(draft.tokens) for draft in whole} == {6}


def test_a_chain_depends_on_its_own_sample_alone(
    base: BaseModel, head: tuple[Head, Params]
) -> None:
    together = drafts(compiled(base, head, 2), asked(), lambda sample: 1 + sample % 4)
    alone = drafts(compiled(base, head), asked(), lambda sample: 4 * (sample == 7))
    assert alone[7] == together[7]


def test_a_second_draft_without_a_new_token_is_the_first_one(
    base: BaseModel, head: tuple[Head, Params]
) -> None:
    drafter = HeadDrafter(compiled(base, head))
    streams = begun(drafter, asked())
    first, second = (drafter.propose([(s, DEPTH) for s in streams]) for _ in range(2))
    assert first == second


def test_new_parameters_are_drafted_with_at_once(base: BaseModel) -> None:
    head, params = untaught_head(base)
    generator = torch.Generator().manual_seed(1)
    others = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in params.items()}
    network = compiled(base, (head, params))
    before = drafts(network, asked(temperature=0.0), lambda _: DEPTH)
    network.use(others)
    after = drafts(network, asked(temperature=0.0), lambda _: DEPTH)
    assert [draft.tokens for draft in after] != [draft.tokens for draft in before]
    fresh = compiled(base, (head, others))
    assert after == drafts(fresh, asked(temperature=0.0), lambda _: DEPTH)


def test_a_sample_for_which_there_is_no_room_is_not_drafted_for(
    base: BaseModel, head: tuple[Head, Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_head, "MOST_ROWS", 64)  # four blocks: 9 to 28 rows take one or two
    network = compiled(base, head)
    found = drafts(network, asked(), lambda _: DEPTH)
    whole = drafts(compiled(base, head), asked(), lambda _: DEPTH)
    assert 2 <= sum(draft.tokens != () for draft in found) <= 4
    assert all(one in (Draft(), other) for one, other in zip(found, whole, strict=True))
    assert drafts(network, asked(), lambda _: DEPTH) == found  # all of it was given back
