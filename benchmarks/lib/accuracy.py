"""The yardstick of accuracy: transformers in float32 on a file's own weights, not rounded.

A model in bfloat16 has rounded weights, whatever computes it. How far float32 arithmetic on the
rounded weights is from float32 on the weights themselves is the floor, and what a bfloat16 pass
adds is judged by its multiple. Rounding as transformers does in bfloat16 is no aim.

Axes: T tokens of a text, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_OF_FLOOR = 1.3
MOST_NATS = 0.015
"""Of the mean distance of log-probabilities in bfloat16, on SmolLM2-135M."""
MOST_NATS_FLOAT32 = 2e-5
"""The same in float32: another order of sums, through 30 layers."""


class FullPrecision:
    """folder: in Hugging Face's layout, with float32 weights (`ensure_hf_folder`). rounded_to: a
    number type that the weights pass through; the arithmetic is float32 all the same."""

    def __init__(self, folder: Path, rounded_to: torch.dtype = torch.float32):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.to(rounded_to))
        self.model = model
        self.parameters = model.num_parameters()
        self.unembedding = model.lm_head.weight.numel()

    @torch.inference_mode()
    def log_distribution(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """float64 (tokens, V): the log-probabilities that each of `tokens` was drawn from."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = self.model(ids, logits_to_keep=len(tokens)).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
        """(tokens,): of the tokens themselves."""
        return chosen(self.log_distribution(prompt, tokens), tokens).numpy()


def chosen(log_p: Tensor, tokens: Sequence[int]) -> Tensor:
    return log_p.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@dataclass(frozen=True)
class Text:
    """logprobs float32 (tokens,): as somebody computed them after the prompt."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class Distance:
    """Mean |d| of log-probabilities, in nats, over all tokens of some texts. floor_nats: what the
    rounding of the weights alone gives."""

    nats: float
    floor_nats: float

    @property
    def of_floor(self) -> float:
        return self.nats / self.floor_nats


class Yardstick:
    """folder: as of FullPrecision."""

    def __init__(self, folder: Path):
        self.whole = FullPrecision(folder)
        self.rounded = FullPrecision(folder, torch.bfloat16)

    def distance(self, texts: Sequence[Text]) -> Distance:
        ours, floor = [], []
        for text in texts:
            exact = self.whole.logprobs(text.prompt, text.tokens)
            ours.append(np.abs(text.logprobs - exact))
            floor.append(np.abs(self.rounded.logprobs(text.prompt, text.tokens) - exact))
        return Distance(float(np.concatenate(ours).mean()), float(np.concatenate(floor).mean()))


def relative_distance(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """|g - e| / |e| over all tensors together, by name."""
    assert gradients.keys() == exact.keys()
    apart = sum(float((gradients[name] - exact[name]).double().square().sum()) for name in exact)
    return (apart / sum(float(tensor.double().square().sum()) for tensor in exact.values())) ** 0.5
