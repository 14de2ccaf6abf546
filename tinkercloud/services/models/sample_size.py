"""How many tokens a sample takes, before it is checked."""

from tinker_gmi.types import SampleRequest


def num_prompt_tokens(body: SampleRequest) -> int:
    return sum(len(getattr(chunk, "tokens", ())) for chunk in body.prompt.chunks)


def most_tokens(body: SampleRequest, max_context_length: int) -> int:
    """The prompt's, and as many as may be drawn."""
    num_prompt = num_prompt_tokens(body)
    longest = max(max_context_length - num_prompt, 0)
    limit = body.sampling_params.max_tokens
    each = longest if limit is None else min(max(limit, 0), longest)
    return num_prompt + body.num_samples * each
