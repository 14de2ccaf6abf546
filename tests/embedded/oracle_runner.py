"""A network that knows how texts go on, in place of one that was trained to."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud.decoding.sampler import Scan, row_norms
from tinkercloud.embedded.forward.batch import Batch
from tinkercloud.embedded.forward.kv_blocks import BLOCK_TOKENS, BlockPool, KVLayout
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.weights.token_bytes import TokenBytes


class KnowingRunner:
    """It goes on with a known text, whatever tokens that was cut into so far; what it says has the
    chance 1/2.

    Its keys and values are the tokens themselves, in the blocks: told wrong blocks or places, or
    blocks with another's tokens, it does not know the text.
    """

    is_exact = True
    fuses_lm_head, scores, candidates = False, None, None
    scan: Scan | None = None

    def __init__(self, tokenizer: TokenBytes, texts: Sequence[bytes], vocab_size: int):
        self._tokenizer, self._texts, self._vocab_size = tokenizer, texts, vocab_size
        self._memory: dict[tuple[int, int], int] = {}
        self.num_rows = 0
        self.captured = torch.empty(0, 0, 0)
        self.norms = row_norms

    def kv_layout(self, base: BaseModel) -> KVLayout:
        return KVLayout.PLAIN

    def is_row_invariant(self, base: BaseModel) -> bool:
        return True

    def capture(self, base: BaseModel, layers: tuple[int, ...]) -> None:
        """It has none."""

    def forward(self, batch: Batch, pool: BlockPool) -> Tensor:
        self.num_rows += len(batch.tokens)
        for row, token in enumerate(batch.tokens.tolist()):
            self._memory[_place(batch, row, int(batch.positions[row]))] = token
        return torch.stack([self._logits(batch, row) for row in batch.logit_rows.tolist()])

    def _logits(self, batch: Batch, row: int) -> Tensor:
        places = range(int(batch.positions[row]) + 1)
        tokens = [self._memory[_place(batch, row, place)] for place in places]
        logits = torch.zeros(self._vocab_size)
        for text in self._texts:
            said = self._tokenizer.joined(tokens).removeprefix(b" ")
            if text.startswith(said) and len(text) > len(said):
                logits[self._next(text, said, tokens)] = math.log(self._vocab_size - 1)
        return logits

    def _next(self, text: bytes, said: bytes, tokens: list[int]) -> int:
        """As the whole text is cut, where what is there was."""
        whole = self._tokenizer.encode_beginning(text)
        if whole[: len(tokens)] == tokens:
            return whole[len(tokens)]
        return self._tokenizer.encode(text[len(said) :])[0]

    def rest(self) -> None:
        pass


def _place(batch: Batch, row: int, position: int) -> tuple[int, int]:
    table = batch.tables[batch.sequence[row]]
    return int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
