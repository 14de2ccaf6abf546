"""Drafts of somebody else, judged by a model: which of their tokens it samples itself."""

from dataclasses import replace

from tinkercloud.chat.requests import DraftedPrompt, Usage, Verification
from tinkercloud.core.types import num_equal
from tinkercloud.errors import InvalidField
from tinkercloud.services.chats.chat_service import sample_body
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.chats.request_slots import RequestSlots
from tinkercloud.services.chats.text_completion_service import prompt_tokens
from tinkercloud.services.chats.text_models import TextModels
from tinkercloud.services.models.sampling_service import SamplingService


class VerifyService:
    def __init__(
        self, names: ModelNames, texts: TextModels, sampling: SamplingService, slots: RequestSlots
    ):
        self._names, self._texts = names, texts
        self._sampling, self._slots = sampling, slots

    async def verify(self, user: str, request: DraftedPrompt) -> Verification:
        """Cancelling the call ends it. Raises as `TextCompletionService.begin`."""
        self._slots.check(user)
        sampler = await self._names.resolve(user, request.model)
        vocab_size = self._texts.served(sampler.base_model).vocab_size
        if any(not 0 <= token < vocab_size for token in request.drafted):
            raise InvalidField("drafted", f"drafted holds tokens outside 0..{vocab_size - 1}")
        text = await self._texts.get(sampler.base_model)
        prompt = await prompt_tokens(text, request.prompt)
        options = replace(request.sampling, max_tokens=len(request.drafted) + 1)
        checked = await self._sampling.checked(sampler, sample_body(prompt, options))
        drafted_request = replace(checked, drafted=request.drafted, speculate=False)
        with self._slots.held(user):
            drawn = await self._sampling.draw(sampler, drafted_request)
        sequence = drawn.output.sequences[0]
        num_accepted = num_equal(request.drafted, sequence.tokens.tolist())
        # A backend may sample on where the draft was wrong.
        tokens = tuple(sequence.tokens[: num_accepted + 1].tolist())
        is_whole = len(tokens) == len(sequence.tokens)
        usage = Usage(len(prompt), len(tokens), drawn.output.prompt_cache_hit_tokens)
        return Verification(
            tokens,
            tuple(sequence.logprobs[: len(tokens)].tolist()),
            num_accepted,
            is_whole and sequence.stop_reason == "stop",
            usage,
        )
