"""Samples that a draft may learn from where no training pass shows the model's states and no drafts
are verified: they wait for a pass of their own, in quiet time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinkercloud.embedded.draft_training.capture import (
    MIN_TOKENS,
    CapturedSequence,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.learning.cases import Tokens

MAX_TEXTS = 64
MAX_TOKENS = 1024  # of a text, its prompt included; what is beyond is left out


@dataclass(frozen=True, slots=True)
class _Text:
    version: Version
    tokens: Tokens
    num_prompt: int
    temperature: float
    epoch: int


class SampledTexts:
    """The newest ones, as far as there is room. A version that is forgotten takes its texts along:
    they would hold its weights in memory."""

    def __init__(self) -> None:
        self._texts: deque[_Text] = deque(maxlen=MAX_TEXTS)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, stream: Stream, version: Version) -> int:
        """How many tokens of the model's there are in it to learn from."""
        tokens = np.array(stream.tokens[:MAX_TOKENS], np.int32)
        num_own = len(tokens) - stream.num_prompt
        if num_own < MIN_TOKENS:
            return 0
        temperature, epoch = stream.params.temperature, stream.epoch
        self._texts.append(_Text(version, tokens, stream.num_prompt, temperature, epoch))
        return num_own

    def forget(self, version_id: str) -> None:
        kept = [text for text in self._texts if text.version.id != version_id]
        self._texts = deque(kept, maxlen=MAX_TEXTS)

    def clear(self) -> None:
        self._texts.clear()

    def capture_next(self, layers: Sequence[int], epoch: int | None = None) -> CapturedSequence:
        """Of the oldest one, by a pass over it. epoch: None for that of its stream."""
        text = self._texts.popleft()
        epoch = text.epoch if epoch is None else epoch
        meta = SequenceMetadata(text.temperature, epoch, category=text.version.origin)
        return capture_sequence(text.version, text.tokens, layers, text.num_prompt, meta)
