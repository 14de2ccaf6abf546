"""Whether sampled tokens are right, by transformers' probabilities of the same weights.

A fast wrong answer is worth nothing: greedy tokens must be the likeliest ones, up to ties, and
tokens drawn at temperature 1 must be as likely as draws from the distribution are.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

GREEDY_GAP = {"float32": 0.05, "bfloat16": 0.3}
"""Nats by which a greedy token may be less likely than the likeliest: rounding decides ties."""
SAMPLED_Z = 5.0
"""Standard deviations by which a sample's log-probability may be off its expectation."""


class Reference:
    def __init__(self, folder: Path, dtype: str):
        """folder: a Hugging Face folder."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.eval()
        self._dtype = dtype
        self.parameters = model.num_parameters()
        self.unembedding = model.get_output_embeddings().weight.numel()

    @torch.inference_mode()
    def log_distribution(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(tokens, vocabulary): the log-probabilities that each of `tokens` was drawn from."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = self._model(ids, logits_to_keep=len(tokens)).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def greedy_gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """The most that a token is less likely than the likeliest one, in nats."""
        log_p = self.log_distribution(prompt, tokens)
        return float((log_p.max(-1).values - chosen(log_p, tokens)).max())

    def sampled_z(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """How many standard deviations the tokens' log-probability is off its expectation."""
        log_p = self.log_distribution(prompt, tokens).double()
        probabilities = log_p.exp()
        mean = (probabilities * log_p).sum(-1)
        variance = (probabilities * log_p.pow(2)).sum(-1) - mean.pow(2)
        excess = chosen(log_p, tokens).sum() - mean.sum()
        return float(excess) / max(math.sqrt(float(variance.sum())), 1e-6)

    def fault(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sequence[int]],
        *,
        greedy: bool = False,
    ) -> str | None:
        """What is wrong with samples[i], tokens after prompts[i]; None: nothing."""
        for prompt, tokens in zip(prompts, samples, strict=True):
            if greedy and (gap := self.greedy_gap(prompt, tokens)) > GREEDY_GAP[self._dtype]:
                return f"a greedy token is {gap:.2f} nats less likely than the likeliest"
            if not greedy and abs(z := self.sampled_z(prompt, tokens)) > SAMPLED_Z:
                return f"samples are {z:.1f} standard deviations off the distribution"
        return None


def chosen(log_p: Tensor, tokens: Sequence[int]) -> Tensor:
    return log_p.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
