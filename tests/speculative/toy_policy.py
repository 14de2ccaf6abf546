"""A policy whose hidden state after a token follows from that token alone, so that what a head has
to learn, and a planted shift of it, are known."""

import numpy as np
import torch
from torch import Tensor

from tests.speculative.head_scene import D, V, target_config, target_weights
from tinkercloud.embedded.head_student import CapturedSequence, HeadStudent, HeadTraining, Told
from tinkercloud.speculative.draft_vocabulary import DraftVocabulary
from tinkercloud.speculative.head import FrozenRows, Head, HeadConfig, fresh_params

LENGTH = 24
ALL = range(V)


class ToyPolicy:
    """says: the tokens that it ever draws. Another seed is another policy."""

    def __init__(self, seed: int, says: range = ALL):
        generator = torch.Generator().manual_seed(1000 + seed)
        self.weights = target_weights()
        turn = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
        self.after = self.weights["model.embed_tokens"] @ turn  # (V, D)
        self.logits = self.after @ self.weights["lm_head"].T * 0.5
        silent = [x for x in range(V) if x not in says]
        self.logits[:, silent] = -30.0
        self.says = says

    def sequence(self, seed: int, epoch: int = 0, temperature: float = 1.0) -> CapturedSequence:
        coins = np.random.default_rng(seed)
        tokens = [int(coins.choice(self.says))]
        laws = torch.softmax(self.logits.double(), -1).numpy()
        while len(tokens) < LENGTH:
            tokens.append(int(coins.choice(V, p=laws[tokens[-1]])))
        ids = torch.tensor(tokens)
        told = Told(num_prompt=2, temperature=temperature, epoch=epoch, count=16)
        return CapturedSequence.of(ids, self.after[ids][:, None], self.logits[ids], told)

    def sequences(self, count: int, first_seed: int, epoch: int = 0) -> list[CapturedSequence]:
        return [self.sequence(first_seed + i, epoch) for i in range(count)]


def student_of(
    weights: dict[str, Tensor], training: HeadTraining | None = None, seed: int = 0
) -> HeadStudent:
    config = HeadConfig.of(target_config(), (4,))
    head = Head(config, FrozenRows.of(weights, DraftVocabulary.of(ALL, V)))
    return HeadStudent(head, fresh_params(config, seed), training or HeadTraining())
