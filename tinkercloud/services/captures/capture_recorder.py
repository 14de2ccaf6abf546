"""One request within a capture session: its prompt goes on from what was sampled, and its turn is
kept."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkercloud.captures.continuation import following_tokens, joined
from tinkercloud.captures.digests import next_digest, prefix_digests, same_calls
from tinkercloud.chat.text_model import Conversation, TextModel
from tinkercloud.chat.turn import Turn
from tinkercloud.storage.captures import (
    AnsweredConversation,
    Capture,
    CapturedSample,
    CapturedTurn,
    CaptureStorage,
    SampleRef,
)


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where in its session a request belongs, by its URL or its headers."""

    group: str | None = None
    episode: str | None = None


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is known of a turn before it is sampled. prompt, messages: what follows the parent's."""

    parent: SampleRef | None
    digest: str
    prompt: Sequence[int]
    messages: Sequence[Mapping[str, Any]]


class CaptureRecorder:
    """The prompt source and the listener of one turn. end_tokens: of a base model, by name."""

    def __init__(
        self,
        captures: CaptureStorage,
        capture: Capture,
        place: TurnPlace,
        end_tokens: Callable[[str], Collection[int]],
    ):
        self._captures = captures
        self._capture = capture
        self._place = place
        self._end_tokens = end_tokens
        self._opening: _Opening | None = None

    async def prompt(self, conversation: Conversation, model: TextModel) -> Sequence[int]:
        place = (model.name, self._place.group, self._place.episode)
        digests = prefix_digests(conversation, place)
        prompt = await self._continued(conversation, model, digests)
        if prompt is not None:
            return prompt
        tokens = await asyncio.to_thread(model.prompt, conversation)
        self._opening = _Opening(None, digests[-1], tokens, conversation.messages)
        return tokens

    async def _continued(
        self, conversation: Conversation, model: TextModel, digests: Sequence[str]
    ) -> Sequence[int] | None:
        """None: this conversation goes on from no captured answer."""
        # To continue an answer within its text is another prompt than what follows its end.
        if conversation.continue_final_message:
            return None
        num_answered, parent = await self._parent(conversation, digests)
        if parent is None:
            return None
        before = await self._captures.tokens_to(self._capture, parent)
        ends = self._end_tokens(model.name)
        following = await asyncio.to_thread(
            following_tokens, model, conversation, num_answered, ends
        )
        if following is None:
            return None
        if following and not model.codec.bytes_of(following[0]):
            ends = {*ends, following[0]}  # a special token: it ends turns in this template
        tail = joined(before[-1].tolist(), following, ends)
        messages = conversation.messages[num_answered:]
        self._opening = _Opening(parent, digests[-1], tail, messages)
        return _concatenated([*before, np.array(tail, np.int32)]).tolist()

    async def _parent(
        self, conversation: Conversation, digests: Sequence[str]
    ) -> tuple[int, SampleRef | None]:
        """The longest beginning of the conversation that was answered here, as its number of
        messages with the answer, and that answer."""
        places = [
            place
            for place, message in enumerate(conversation.messages, start=1)
            if message["role"] == "assistant"
        ]
        if not places:
            return 0, None
        answers = await self._captures.answered(self._capture, {digests[p] for p in places})
        by_digest: dict[str, list[AnsweredConversation]] = {}
        for answer in answers:
            by_digest.setdefault(answer.digest, []).append(answer)
        for place in reversed(places):
            matching = by_digest.get(digests[place])
            if matching:
                message = conversation.messages[place - 1]
                # The newest comes first, where calls tell none apart.
                exact = [answer for answer in matching if same_calls(answer.message, message)]
                return place, (exact or matching)[0].ref
        return 0, None

    async def finished(self, turn: Turn) -> None:
        # A client that goes away now leaves a whole turn: it was sampled to its end.
        await asyncio.shield(asyncio.ensure_future(self._captures.add_turn(self._turn(turn))))

    def _turn(self, turn: Turn) -> CapturedTurn:
        opening = self._opening
        assert opening is not None, "the prompt comes before the answer"
        samples = tuple(
            CapturedSample(
                index,
                next_digest(opening.digest, answer.message),
                *(sequence.tokens, sequence.logprobs),
                answer.finish_reason,
                answer.message,
            )
            for index, (sequence, answer) in enumerate(
                zip(turn.output.sequences, turn.answers, strict=True)
            )
        )
        return CapturedTurn(
            *(turn.turn_id, self._capture.capture_id, turn.user, opening.parent),
            *(self._place.group, self._place.episode, opening.digest),
            np.array(opening.prompt, np.int32),
            [dict(message) for message in opening.messages],
            _details(turn, opening.parent),
            samples,
        )


def _details(turn: Turn, parent: SampleRef | None) -> dict[str, Any]:
    weights = {
        "base_model": turn.base_model,
        "model_path": turn.model_path,
        "sampling_session_id": turn.sampler_id,
        "version": turn.version,
    }
    params = asdict(turn.request.params)
    details: dict[str, Any] = {"model": turn.model, "weights": weights, "params": params}
    if parent is None and turn.conversation.tools:
        details["tools"] = [dict(tool) for tool in turn.conversation.tools]
    return details


def _concatenated(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts)
