"""Verification of drafts: its bodies in our form, our answer in a form like OpenAI's."""

from collections.abc import Mapping
from typing import Any

from tinkercloud.chat.requests import DraftedPrompt, SamplingOptions, Verification
from tinkercloud.errors import InvalidField
from tinkercloud.openai_api.bodies import VerifyBody
from tinkercloud.openai_api.chat_answers import LOWEST_LOGPROB, usage_json

# field: values that ask for nothing. What they ask for follows from all tokens of a sample, and a
# verification does not know which of its prompt were sampled.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, []),
    "stream": (None, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
}


def drafted_prompt(body: VerifyBody) -> DraftedPrompt:
    """Raises InvalidField."""
    body.refuse_unsupported()
    for name, harmless in _REFUSED.items():
        if (body.model_extra or {}).get(name) not in harmless:
            raise InvalidField(name, f"{name} is not served with drafts; ask for completions")
    sampling = SamplingOptions(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,  # 0 means no limit to vLLM's clients
        min_p=body.min_p or 0.0,
        seed=body.seed,
    )
    prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    return DraftedPrompt(body.model, prompt, tuple(body.drafted), sampling)


def verification_json(model: str, verification: Verification) -> dict[str, Any]:
    tokens, accepted = verification.tokens, verification.num_accepted
    return {
        "object": "verification",
        "model": model,
        "accepted": accepted,
        "next_token": tokens[accepted] if accepted < len(tokens) else None,
        "tokens": list(tokens),
        "logprobs": [max(logprob, LOWEST_LOGPROB) for logprob in verification.logprobs],
        "finish_reason": "stop" if verification.has_ended else None,
        "usage": usage_json(verification.usage),
    }
