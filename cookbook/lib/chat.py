"""Text to tokens and back, by the chat template of the model's own tokenizer."""

from typing import Any


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    """A question by a user, up to where the assistant's answer begins.

    The system message is empty: SmolLM2's template would add its own twenty tokens to every
    sequence otherwise.
    """
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def answer_tokens(tokenizer: Any, answer: str) -> list[int]:
    """What the assistant should say, with the token that ends its turn."""
    return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def example(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[float]]:
    """(tokens_T, weights_T): weight 1 on what the assistant says, 0 on what it is asked."""
    prompt, said = prompt_tokens(tokenizer, question), answer_tokens(tokenizer, answer)
    return prompt + said, [0.0] * len(prompt) + [1.0] * len(said)


def reply_tokens(tokenizer: Any, text: str) -> list[int]:
    """What stands between an answer that ended its turn and the next one, where the user says
    `text`. A conversation goes on in the tokens that were sampled, so none is tokenized twice."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": text},
    ]
    rendered = [
        tokenizer.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=n == 3)
        for n in (2, 3)
    ]
    ended = rendered[0].rpartition(tokenizer.eos_token)[0] + tokenizer.eos_token
    return tokenizer.encode(rendered[1].removeprefix(ended), add_special_tokens=False)


def answer_text(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)
