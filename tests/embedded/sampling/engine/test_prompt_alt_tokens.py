"""Draws over a prompt, through the whole engine."""

import numpy as np
import pytest
import torch

from tests.embedded.tiny import VOCAB, Sampler, ask, random_prompt, same
from tinkercloud.core.types import SampleRequest
from tinkercloud.embedded.process.model_store import ModelStore

PROMPT = random_prompt(300, 5)  # several chunks


def drawing(prompt: list[int] = PROMPT, k: int = 3, **more: object) -> SampleRequest:
    return ask(prompt, **({"max_tokens": 3, "seed": 4, "prompt_alt_tokens": k} | more))


def test_a_prompts_draws_have_the_models_logprobs(store: ModelStore, base: str) -> None:
    request = drawing(temperature=0.7, topk_prompt_logprobs=VOCAB, prompt_logprobs_last_n=5)
    output = Sampler(store).one(base, request)
    alternatives, topk = output.prompt_alt_tokens, output.topk_prompt_logprobs
    assert alternatives is not None and topk is not None
    assert alternatives.tokens.shape == alternatives.logprobs.shape == (299, 3)
    assert (alternatives.logprobs < 0).all()
    for position in range(295, 300):  # those that are scored too
        scores = np.full(VOCAB, np.nan, np.float32)
        scores[topk.token_ids[position]] = topk.logprobs[position]
        row = position - 1
        expected = scores[alternatives.tokens[row]]
        np.testing.assert_array_equal(alternatives.logprobs[row], expected)


def test_draws_do_not_depend_on_the_batch_and_change_no_sample(
    store: ModelStore, base: str
) -> None:
    request = drawing()
    alone = Sampler(store).one(base, request)
    others = {str(i): (base, drawing(random_prompt(50 + i, i), seed=i)) for i in range(4)}
    together = Sampler(store).run({"ours": (base, request), **others})["ours"]
    assert np.array_equal(together.prompt_alt_tokens.tokens, alone.prompt_alt_tokens.tokens)
    plain = Sampler(store).one(base, ask(PROMPT, max_tokens=3, seed=4, prompt_logprobs=True))
    same(alone, plain)
    other_seed = Sampler(store).one(base, drawing(seed=5))
    assert not np.array_equal(other_seed.prompt_alt_tokens.tokens, alone.prompt_alt_tokens.tokens)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts_have_shapes_too(store: ModelStore, base: str, length: int) -> None:
    output = Sampler(store).one(base, drawing(PROMPT[:length], temperature=0.0))
    assert output.prompt_alt_tokens is not None
    assert output.prompt_alt_tokens.tokens.shape == (length - 1, 3)
    assert not torch.is_tensor(output.prompt_alt_tokens.tokens)
