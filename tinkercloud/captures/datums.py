"""A trajectory as one training example, in the JSON of `tinker.Datum`.

Position i predicts token i + 1 (wire specification, section 7). Only sampled tokens are trained:
the prompt's, the template's and those of tool results have advantage 0.
"""

# N tokens of the trajectory; a datum has N - 1 positions

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.captures.rewards import Scored
from tinkercloud.captures.trajectories import Trajectory

LOSSES: Mapping[str, tuple[str, ...]] = {
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
    "cross_entropy": ("weights",),
}
"""Inputs of each loss besides target_tokens."""


def trajectory_tokens(trajectory: Trajectory) -> NDArray[np.int32]:
    """(N,): the prompt and the samples of each turn, as they were read and drawn."""
    parts = [part for step in trajectory.steps for part in (step.turn.prompt, step.sample.tokens)]
    return np.concatenate(parts)


def datum(scored: Scored, loss: str) -> dict[str, Any]:
    """loss: a key of LOSSES. weights of cross_entropy: the advantages, which are rewards where
    these are raw."""
    steps = scored.trajectory.steps
    advantages = scored.advantages or (0.0,) * len(steps)
    columns: dict[str, list[NDArray[np.float32]]] = {"logprobs": [], "advantages": [], "mask": []}
    for step, advantage in zip(steps, advantages, strict=True):
        unscored = np.zeros(len(step.turn.prompt), np.float32)
        sampled = np.ones(len(step.sample.tokens), np.float32)
        columns["logprobs"] += [unscored, step.sample.logprobs]
        columns["advantages"] += [unscored, sampled * np.float32(advantage)]
        columns["mask"] += [unscored, sampled]
    arrays = {name: np.concatenate(parts)[1:] for name, parts in columns.items()}
    arrays |= {"weights": arrays["advantages"], "sequence_ratio_mask": arrays["mask"]}
    tokens = trajectory_tokens(scored.trajectory).tolist()
    inputs = {"target_tokens": _tensor(tokens[1:], "int64")}
    inputs |= {name: _tensor(arrays[name].tolist(), "float32") for name in LOSSES[loss]}
    chunk = {"type": "encoded_text", "tokens": tokens[:-1]}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def _tensor(data: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}
