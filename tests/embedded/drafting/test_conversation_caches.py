"""Keys and values of ended samples serve those that begin with their tokens."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.embedded.drafting.test_catching_up import model_drafter
from tests.embedded.tiny import open_store
from tinkercloud.core.types import SamplingParams
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.batch import SequenceRows
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.speculative.drafters.drafter import Draft, Stream

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
PROMPT = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(0)).tolist()
MOST = 4


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    return open_store(folder).base("tiny")


class Reading:
    """A drafter, and how many tokens it has read."""

    def __init__(self, base: BaseModel):
        made = model_drafter(base)
        assert isinstance(made, ModelDrafter)
        self.drafter, self.num_read = made, 0
        forward = made._forward

        def counted(parts: list[SequenceRows]) -> torch.Tensor:
            self.num_read += sum(len(part.tokens) for part in parts)
            return forward(parts)

        made._forward = counted  # type: ignore[method-assign, assignment]

    def turn(self, tokens: list[int], number: int, salt: str = "") -> Draft:
        one = stream(tokens, number, salt)
        self.drafter.begin(one)
        self.num_read = 0
        (draft,) = self.drafter.propose([(one, MOST)])
        self.drafter.end(one)
        return draft


def stream(tokens: list[int], number: int, salt: str = "") -> Stream:
    return Stream(number, None, "v", 0, list(tokens), 2, SamplingParams(None, 7, 1.0), 0, salt)


def test_the_next_turn_reads_what_is_new_and_drafts_the_same(base: BaseModel) -> None:
    reading, anew = Reading(base), Reading(base)
    draft = reading.turn(PROMPT, 0)
    assert reading.num_read == len(PROMPT) + MOST - 1
    longer = [*PROMPT, *draft.tokens, 5, 6, 7]
    again = reading.turn(longer, 1)
    num_kept = (len(PROMPT) + MOST - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert reading.num_read == len(longer) - num_kept + MOST - 1
    assert again == anew.turn(longer, 1)
    assert anew.num_read > reading.num_read


def test_another_salt_shares_nothing(base: BaseModel) -> None:
    reading = Reading(base)
    reading.turn(PROMPT, 0, "a")
    reading.turn(PROMPT, 1, "b")
    assert reading.num_read == len(PROMPT) + MOST - 1
    reading.turn(PROMPT, 2, "a")
    assert reading.num_read < len(PROMPT)


def test_what_was_unused_for_long_or_is_of_other_weights_is_forgotten(base: BaseModel) -> None:
    reading, whole = Reading(base), len(PROMPT) + MOST - 1
    reading.turn(PROMPT, 0)
    reading.drafter.forget_ended(time.monotonic() - 60)
    reading.turn(PROMPT, 1)
    assert reading.num_read < whole
    reading.drafter.forget_ended(time.monotonic() + 1)
    assert reading.drafter._pool.num_available == reading.drafter._pool.num_blocks
    reading.turn(PROMPT, 2)
    assert reading.num_read == whole
    running = stream(PROMPT, 3)
    reading.drafter.begin(running)
    reading.drafter.propose([(running, MOST)])
    reading.drafter.use(replace(reading.drafter.version))
    reading.num_read = 0
    reading.drafter.propose([(running, MOST)])
    assert reading.num_read == whole
    reading.drafter.end(running)


def test_a_sample_that_goes_back_leaves_others_blocks_alone(base: BaseModel) -> None:
    reading = Reading(base)
    expected = reading.turn(PROMPT, 0)
    other = stream(PROMPT, 1)
    reading.drafter.begin(other)
    reading.drafter.propose([(other, MOST)])
    other.tokens[20:] = [1, 2, 3]
    reading.drafter._changed(other.id, 20)
    (changed,) = reading.drafter.propose([(other, MOST)])
    assert changed == Reading(base).turn(other.tokens, 1)
    assert reading.turn(PROMPT, 2) == expected
    assert reading.num_read < len(PROMPT)
    reading.drafter.end(other)
    assert reading.drafter._pool.num_available == reading.drafter._pool.num_blocks


def test_old_turns_make_room(base: BaseModel) -> None:
    reading = Reading(base)
    for number in range(60):
        reading.turn([number, *PROMPT], number)
        assert reading.num_read > len(PROMPT)
    assert reading.drafter._pool.num_available == reading.drafter._pool.num_blocks
