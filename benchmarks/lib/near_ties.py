"""Which differences count between greedy texts of a server that rounds by the size of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import openai

NUM_LIKELIEST = 5
Likeliest = Mapping[str, float]
"""Log-probabilities by the text of a token."""


async def is_near_tie(
    client: openai.AsyncOpenAI, model: str, prompt: str, num_tokens: int, text: str
) -> bool:
    """Whether `text` parts from the server's own greedy text where its two likeliest tokens are no
    further apart than their distance changes, in some place of that text, between the server's own
    batches: of one token, and of a prompt."""
    own = await client.completions.create(
        model=model, prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice: dict[str, Any] = own.model_dump()["choices"][0]
    found, before = choice["logprobs"], choice["prompt_token_ids"]
    again = await client.completions.create(
        model=model, prompt=[*before, *choice["token_ids"]], max_tokens=1, temperature=0,
        extra_body={"prompt_logprobs": NUM_LIKELIEST},
    )  # fmt: skip
    rows = again.model_dump()["choices"][0]["prompt_logprobs"][len(before) :]
    as_prompt = [{row["decoded_token"]: row["logprob"] for row in each.values()} for each in rows]
    tokens, likeliest = found["tokens"], found["top_logprobs"]
    return gap_where_it_parts(tokens, likeliest, text) <= largest_change(likeliest, as_prompt)


def gap_where_it_parts(tokens: Sequence[str], likeliest: Sequence[Likeliest], text: str) -> float:
    """Between the two likeliest tokens in the first place where the text is another one; inf where
    there is none."""
    said = ""
    for token, top in zip(tokens, likeliest, strict=True):
        said += token
        if not text.startswith(said):
            best, second = sorted(top.values(), reverse=True)[:2]
            return best - second
    return float("inf")


def largest_change(alone: Sequence[Likeliest], as_prompt: Sequence[Likeliest]) -> float:
    """Of the distance between the two likeliest tokens, over all places."""
    changes = [0.0]
    for top, row in zip(alone, as_prompt, strict=True):
        best, second = sorted(top, key=top.__getitem__, reverse=True)[:2]
        if best in row and second in row:
            changes.append(abs((top[best] - top[second]) - (row[best] - row[second])))
    return max(changes)
