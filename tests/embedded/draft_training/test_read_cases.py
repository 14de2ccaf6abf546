"""Cases out of texts that the target has read."""

from pathlib import Path

import numpy as np
import pytest

from tests.embedded.draft_training.toy_policy import tiny_version
from tests.embedded.tiny import random_prompt
from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.draft_training.read_cases import (
    MAX_CASES,
    UNDRAFTED,
    add_read,
    read_cases,
)
from tinkercloud.speculative.learning.cases import CaseStore

NUM_PROMPT, NUM_TOKENS = 5, 50


@pytest.fixture(scope="module")
def sequence(folder_of_tiny: Path) -> CapturedSequence:
    tokens = np.array(random_prompt(NUM_TOKENS, 1), np.int32)
    meta = SequenceMetadata(0.7, 3, category="m")
    return capture_sequence(tiny_version(folder_of_tiny), tokens, (1,), NUM_PROMPT, meta)


def test_there_is_a_case_for_each_token_behind_the_prompt(sequence: CapturedSequence) -> None:
    cases = read_cases(sequence, "v")
    assert [case.position for case in cases] == list(range(NUM_PROMPT, NUM_TOKENS))
    for case in cases:
        assert case.target == sequence.tokens[case.position] and case.drafted == UNDRAFTED
        assert np.array_equal(case.top_ids, sequence.top_ids[case.position - 1])
        assert (case.temperature, case.epoch, case.category) == (0.7, 3, "m")


def test_of_a_long_text_some_are_kept_from_its_beginning_to_its_end(
    sequence: CapturedSequence,
) -> None:
    store = CaseStore(1 << 20, 4)
    add_read(store, sequence)
    cases = list(store.disagreed)
    positions = [case.position for case in cases]
    assert len(positions) == len(set(positions)) == MAX_CASES
    assert (positions[0], positions[-1]) == (NUM_PROMPT, NUM_TOKENS - 1)
    assert np.array_equal(store.tokens(cases[-1]), sequence.tokens[:-1])
