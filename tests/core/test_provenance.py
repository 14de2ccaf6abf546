"""Spans of a datum against what was recorded."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tinkercloud.core.provenance import (
    check_advantages,
    check_spans,
    sampled_rows,
    sequence_ids,
)
from tinkercloud.core.types import ProvenanceSpan, RecordedSequence
from tinkercloud.errors import InvalidRequest


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def prompt(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan("prompt", sequence_id, offset, length)


def sampled(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan("sampled", sequence_id, offset, length)


@dataclass(frozen=True)
class Annotated:
    model_input_spans: tuple[ProvenanceSpan, ...] = ()
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] = ()


# Two turns: the second prompt is the first one, its answer, and two tokens more.
RECORDS = {
    "a:0": RecordedSequence(ints(1, 2, 3), ints(10, 11), floats(-0.1, -0.2)),
    "b:0": RecordedSequence(ints(1, 2, 3, 10, 11, 4, 5), ints(12, 13, 14), floats(-1, -2, -3)),
}
WHOLE = np.array([1, 2, 3, 10, 11, 4, 5, 12, 13, 14])
TURNS = Annotated(
    (prompt("a:0", 0, 3), sampled("a:0", 0, 2), prompt("b:0", 5, 2), sampled("b:0", 0, 2)),
    (prompt("a:0", 1, 2), sampled("a:0", 0, 2), prompt("b:0", 5, 2), sampled("b:0", 0, 3)),
)


def rows(datum: Annotated = TURNS, tokens: Any = WHOLE[:-1], targets: Any = WHOLE[1:]):
    check_spans("datum 0", datum, len(tokens))
    return sampled_rows("datum 0", datum, (tokens, targets), RECORDS)


def test_rows_have_the_recorded_logprobs_of_their_sampled_tokens() -> None:
    found = rows()
    assert found.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert found.logprobs.tolist() == floats(0, 0, -0.1, -0.2, 0, 0, -1, -2, -3).tolist()


def test_targets_of_prompt_positions_may_be_any_number() -> None:
    targets = WHOLE[1:].copy()
    targets[[0, 1, 4, 5]] = 0  # as the cookbook's rl_loop sends them
    assert rows(targets=targets).mask.sum() == 5


def test_an_empty_span_needs_no_record() -> None:
    datum = Annotated(
        (prompt("a:0", 0, 3), sampled("a:0", 0, 2), sampled("gone:0", 0, 0)),
        (prompt("a:0", 1, 2), sampled("a:0", 0, 2), prompt("b:0", 5, 1)),
    )
    assert sequence_ids([datum]) == {"a:0", "b:0"}
    assert rows(datum, WHOLE[:5], WHOLE[1:6]).mask.tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("position", [0, 3, 8])
def test_a_different_token_is_named_with_its_place(position: int) -> None:
    tokens = WHOLE[:-1].copy()
    tokens[position] = 99
    source, offset, original = {
        0: ("the prompt of sequence 'a:0'", 0, 1),
        3: ("the sampled tokens of sequence 'a:0'", 0, 10),
        8: ("the sampled tokens of sequence 'b:0'", 1, 13),
    }[position]
    with pytest.raises(InvalidRequest) as refusal:
        rows(tokens=tokens)
    text = str(refusal.value)
    assert f"datum 0, model_input, position {position} has token 99" in text
    assert f"token {offset} of {source} is {original}" in text


def test_a_different_target_is_named_with_its_place() -> None:
    targets = WHOLE[1:].copy()
    targets[7:] = [50, 51]
    with pytest.raises(InvalidRequest, match=r"target_tokens, position 7 has token 50.*2 of the"):
        rows(targets=targets)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (sampled("a:0", 1, 2), "tokens 1 to 2 of the sampled tokens.*which has 2"),
        (prompt("a:0", 2, 2), "tokens 2 to 3 of the prompt.*which has 3"),
        (sampled("a:0", 2**62, 2), "which has 2"),
    ],
)
def test_a_span_beyond_the_record_is_refused(span: ProvenanceSpan, text: str) -> None:
    datum = Annotated(
        (prompt("a:0", 0, 3), span), (prompt("a:0", 1, 2), span, sampled("b:0", 0, 1))
    )
    with pytest.raises(InvalidRequest, match=text):
        rows(datum, WHOLE[:5], WHOLE[1:6])


def test_no_provenance_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"record_stability_info=True.*with_provenance"):
        rows(Annotated())


@pytest.mark.parametrize("missing", ["model_input_spans", "loss_fn_input_spans"])
def test_one_list_without_the_other_is_refused(missing: str) -> None:
    with pytest.raises(InvalidRequest, match=f"no {missing}"):
        check_spans("datum 3", replace(TURNS, **{missing: ()}), 9)


def test_spans_that_do_not_tile_are_refused() -> None:
    short = replace(TURNS, loss_fn_input_spans=TURNS.loss_fn_input_spans[:-1])
    with pytest.raises(InvalidRequest, match=r"loss_fn_input_spans.*cover 6 positions.*are 9"):
        check_spans("datum 0", short, 9)


@pytest.mark.parametrize(
    "span", [prompt("", 0, 9), prompt("x" * 257, 0, 9), prompt("a:0", -1, 9), prompt("a:0", 0, -9)]
)
def test_impossible_spans_are_refused(span: ProvenanceSpan) -> None:
    with pytest.raises(InvalidRequest, match=r"model_input_spans\[0\]"):
        check_spans("datum 0", Annotated((span,), (span,)), 9)


def test_an_advantage_outside_of_the_sampled_tokens_is_refused() -> None:
    mask = floats(0, 1, 1)
    check_advantages("datum 2", floats(0, 0.5, 0), mask)
    with pytest.raises(InvalidRequest, match=r"datum 2 has the advantage 0.5 at position 0"):
        check_advantages("datum 2", floats(0.5, 1, 0), mask)
