"""Draws over a prompt: of which distribution they are, and what they depend on."""

from dataclasses import replace

import pytest
import torch

from tinkercloud.core.types import SamplingParams
from tinkercloud.decoding.alt_tokens import alt_tokens

PARAMS = SamplingParams(None, seed=3)
LOGITS = 2 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    k = 40_000
    params = replace(PARAMS, temperature=temperature)
    for row, tokens in zip(LOGITS[:3], alt_tokens(LOGITS[:3], params, 1, k), strict=True):
        probs = torch.softmax(row.double() / temperature, -1)
        frequencies = torch.bincount(tokens, minlength=30) / k
        deviation = (probs * (1 - probs) / k).sqrt()
        assert ((frequencies - probs).abs() < 5 * deviation + 1e-4).all()


def test_draws_depend_on_seed_position_and_draw_alone() -> None:
    whole = alt_tokens(LOGITS, PARAMS, 1, 8)
    for first in (0, 7, 39):
        part = alt_tokens(LOGITS[first : first + 9], PARAMS, 1 + first, 8)
        assert torch.equal(part, whole[first : first + 9])
    assert torch.equal(alt_tokens(LOGITS, PARAMS, 1, 3), whole[:, :3])
    assert not torch.equal(alt_tokens(LOGITS, replace(PARAMS, seed=4), 1, 8), whole)
    same = alt_tokens(LOGITS[:1].expand(40, -1), PARAMS, 1, 8)
    assert len({tuple(row) for row in same.tolist()}) > 35, "positions have their own numbers"


def test_at_temperature_0_all_draws_are_the_likeliest_token() -> None:
    tokens = alt_tokens(LOGITS, replace(PARAMS, temperature=0.0), 1, 3)
    assert torch.equal(tokens, LOGITS.argmax(-1)[:, None].expand(-1, 3))
