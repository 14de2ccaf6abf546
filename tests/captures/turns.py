"""Turns made by hand: a tree in a few lines."""

from itertools import count

import numpy as np

from tinkercloud.storage.captures import CapturedSample, CapturedTurn, SampleRef

_TIMES = count()


def sample(index: int = 0, tokens: tuple[int, ...] = (7, 8)) -> CapturedSample:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    message = {"role": "assistant", "content": str(tokens)}
    numbers = np.array(tokens, np.int32)
    return CapturedSample(index, f"{index}:{tokens}", numbers, logprobs, "stop", message)


def turn(
    name: str,
    after: str | None = None,
    digest: str | None = None,
    *,
    num_samples: int = 1,
    prompt: tuple[int, ...] = (1, 2),
    **labels: str,
) -> CapturedTurn:
    """after: "turn" or "turn:index". digest: the same one for retries; else its name.
    labels: group, episode."""
    parent = None
    if after is not None:
        parent_turn, _, index = after.partition(":")
        parent = SampleRef(parent_turn, int(index or 0))
    return CapturedTurn(
        *(name, "cap", "ann", parent, labels.get("group"), labels.get("episode"), digest or name),
        *(np.array(prompt, np.int32), [{"role": "user", "content": name}]),
        {"model": "m", "weights": {"version": "v"}, "params": {}},
        tuple(sample(index) for index in range(num_samples)),
        created_at=float(next(_TIMES)),
    )
