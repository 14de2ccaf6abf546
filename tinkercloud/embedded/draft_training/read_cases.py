"""Cases of a draft model out of texts that the target has read: where its drafts are not verified,
because they do not pay yet, there are no others."""

import numpy as np

from tinkercloud.embedded.draft_training.capture import CapturedSequence
from tinkercloud.speculative.learning.cases import Case, CaseStore, digest

UNDRAFTED = -1  # a case's drafted token, where no draft was made
MAX_CASES = 32  # of a text: those of one text say much the same


def read_cases(sequence: CapturedSequence, version: str) -> list[Case]:
    """One for each token that the target wrote, with its distribution. version: its id."""
    context = digest(sequence.tokens)
    return [
        Case(
            context, position, UNDRAFTED, int(sequence.tokens[position]),
            sequence.top_ids[position - 1], sequence.top_probs[position - 1],
            sequence.temperature, version, sequence.epoch, sequence.category,
        )
        for position in range(1, len(sequence.tokens))
        if sequence.weights[position - 1] > 0
    ]  # fmt: skip


def add_read(store: CaseStore, sequence: CapturedSequence) -> None:
    """Some of them, evenly over the text; they go with the versions after it as others do."""
    cases = read_cases(sequence, sequence.category)
    for i in np.linspace(0, len(cases) - 1, min(len(cases), MAX_CASES)).astype(int):
        store.add(sequence.tokens, cases[i])
    store.expire(sequence.epoch)
