"""Samples whose tokens the compiled pass draws, with drafts and without, beside those that need
logits."""

from itertools import count

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import Drafting, all_same, knowing
from tests.embedded.tiny import Sampler, ask, random_prompt
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import engine
from tinkercloud.embedded.sampling.engine import SamplingEngine

pytestmark = [
    pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here"),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
]


def requests(base: str) -> dict[str, tuple[str, SampleRequest]]:
    """Those after the first three need logits."""
    prompt = random_prompt(40, 0)
    asked = {
        "plain": ask(prompt, n=3, max_tokens=20),
        "hot": ask(prompt, max_tokens=20, temperature=3.0, seed=2**63),
        "greedy": ask(prompt, max_tokens=20, temperature=0.0),
        "cut": ask(prompt, max_tokens=20, top_k=5, top_p=0.9),
        "penalised": ask(prompt, max_tokens=20, presence_penalty=1.0),
        "with top-k": ask(prompt, max_tokens=20, topk_sample_logprobs=3),
    }
    return {name: (base, request) for name, request in asked.items()}


def speculating(store: ModelStore, outputs: dict[str, SampleOutput], base: str) -> Sampler:
    """With drafts of three tokens, of which every fifth place's is wrong."""
    drafting = Drafting(lambda _: knowing(outputs, requests(base), 5), 3)
    sampler = Sampler(store)
    sampler.engine = SamplingEngine(max_batch=64, kv_cache_bytes=2**30, speculate=drafting)
    return sampler


def rows_drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In how many rows of each pass a token was drawn by it."""
    seen: list[int] = []
    forward = runners.NativeRunner.forward

    def watched(runner: runners.NativeRunner, batch: Batch, pool: BlockPool) -> torch.Tensor:
        seen.append(0 if batch.drawn_from is None else len(batch.drawn_from.rows))
        return forward(runner, batch, pool)

    monkeypatch.setattr(runners.NativeRunner, "forward", watched)
    return seen


def fail_draws(monkeypatch: pytest.MonkeyPatch, number: int, rows: slice | list[int]) -> None:
    """The pass of that number, of those that draw, draws no token of these rows."""
    calls, forward = count(), runners.NativeRunner.forward

    def too_many(runner: runners.NativeRunner, batch: Batch, pool: BlockPool) -> torch.Tensor:
        logits = forward(runner, batch, pool)
        found = runner.candidates
        if found is not None and next(calls) == number:
            found.count[rows] = -1
            found.ids[rows], found.weights[rows] = 0, np.nan
        return logits

    monkeypatch.setattr(runners.NativeRunner, "forward", too_many)


def test_the_tokens_are_those_that_logits_give(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = rows_drawn(monkeypatch)
    drawn = Sampler(store).run(requests(base))
    assert max(seen) == 5, "all samples of the first three requests"
    monkeypatch.setattr(engine, "_with_fused_draw", lambda item, _: item)
    del seen[:]
    expected = Sampler(store).run(requests(base))
    assert not any(seen)
    all_same(drawn, expected)


def test_a_token_that_no_pass_can_draw_comes_with_logits_in_the_next_one(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Sampler(store).run(requests(base))
    seen = rows_drawn(monkeypatch)
    fail_draws(monkeypatch, 4, slice(None, None, 2))
    outputs = Sampler(store).run(requests(base))
    assert max(seen) == 5
    assert 2 in seen, "three of five are not tried again"
    all_same(outputs, expected)


def test_drafts_are_verified_by_tokens_that_the_pass_draws(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Sampler(store).run(requests(base))
    seen = rows_drawn(monkeypatch)
    outputs = speculating(store, expected, base).run(requests(base))
    assert 15 < max(seen) <= 5 * 4, "a row for each drafted token, and one for the next"
    all_same(outputs, expected)


def test_a_draft_with_a_token_that_no_pass_can_draw_is_dropped(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Sampler(store).run(requests(base))
    seen = rows_drawn(monkeypatch)
    fail_draws(monkeypatch, 1, [0, 9])  # of the first sample's rows and of another's
    sampler = speculating(store, expected, base)
    outputs = sampler.run(requests(base))
    broken = [num > 0 for num in seen].index(True) + 1
    assert 12 < seen[broken] <= 5 * 4
    assert seen[broken + 1] <= 3 * 4, "two of five are not tried again"
    all_same(outputs, expected)
