"""One request of a chat and its answers, as exact tokens; and where others may take part in it.

A turn's prompt tokens are known when its `PromptSource` has given them, before anything is
sampled. Its sampled tokens and log-probabilities are those of `Turn.output`, and the weights
version that drew them is `Turn.version`: all of it is known when the last sample has ended, which
is when the listener is called. Nothing is made from text again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinkercloud.chat.answer import Answer
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.core.types import SampleOutput, SampleRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """request.prompt int32 (P,): what the model read. output.sequences: what was sampled, with the
    stop token, and the log-probabilities under the distribution it was drawn from. answers: one
    for each sequence; `Answer.message` is what a client repeats in its next request.

    model: the name in the request. base_model, model_path, sampler_id: what it resolves to; a path
    for a checkpoint, an id for a live sampler, neither for a base model. version: the backend's
    name of the weights."""

    turn_id: str  # the id of the answer, as the client sees it
    user: str
    model: str
    base_model: str
    model_path: str | None
    sampler_id: str | None
    version: str
    conversation: Conversation
    request: SampleRequest
    output: SampleOutput
    answers: tuple[Answer, ...]

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.request.prompt


class PromptSource(Protocol):
    async def prompt(self, conversation: Conversation, model: TextModel) -> Sequence[int]:
        """The exact tokens of the prompt. Raises InvalidRequest."""
        ...


class TurnListener(Protocol):
    async def finished(self, turn: Turn) -> None:
        """Called once, when all samples of a turn have ended, before its client sees the end. What
        is raised here ends the client's request. Turns whose client went away, or whose samples
        failed, are not reported."""
        ...


class RenderedPrompts:
    """The prompt source of plain requests: the chat template, and nothing that came before."""

    async def prompt(self, conversation: Conversation, model: TextModel) -> Sequence[int]:
        return await asyncio.to_thread(model.prompt, conversation)


@dataclass(frozen=True, slots=True)
class TurnHooks:
    """model: what is sampled whatever the request's `model` says, which then only labels it."""

    source: PromptSource = field(default_factory=RenderedPrompts)
    listener: TurnListener | None = None
    model: str | None = None
