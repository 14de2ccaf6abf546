"""Datums with provenance, as the cookbook 0.6.1 builds them."""

from typing import Any

import numpy as np
from tinker import types as official


def single_turn(prompt: list[int], sequence: Any, reward: float, types: Any = official) -> Any:
    """As recipes/rl_loop.py builds it: zeros as the targets of the prompt. types: of a client."""
    tokens, start = list(sequence.tokens), len(prompt) - 1
    assert sequence.logprobs is not None
    assert sequence.sequence_id is not None
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([0] * start + tokens),
            "logprobs": np.array([0.0] * start + sequence.logprobs, np.float32),
            "advantages": np.array([0.0] * start + [reward] * len(tokens), np.float32),
        },
    )
    name = sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=len(prompt) - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )
