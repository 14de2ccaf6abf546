"""The tokens of a prompt that goes on from a captured answer: what was sampled, exactly, then the
template's text of what follows.

Nothing of the earlier turns is rendered or tokenised again, so the whole trajectory stays one
sequence in which every sampled token is the one that was drawn. Templates that would render an
earlier answer otherwise (Qwen3's drops the reasoning of earlier turns, Llama 3's strips blanks, any
tokenizer may cut the same text into other tokens) are not followed in that: the model goes on
reading what it wrote.
"""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace

from tinkercloud.chat.template import Message
from tinkercloud.chat.text_model import Conversation, TextCodec, TextModel
from tinkercloud.errors import InvalidRequest

_ANCHOR = "a"


def following_tokens(
    model: TextModel, conversation: Conversation, num_answered: int, end_tokens: Collection[int]
) -> list[int] | None:
    """What the template writes after the answer messages[num_answered - 1]: the end of its turn,
    the later messages, the opening of the next answer. None: the template does not let the two be
    separated.

    Raises InvalidRequest where the template refuses the conversation as it is."""
    answer: Message = {"role": "assistant"}
    text = _text_after_mark(model, conversation, num_answered, answer)
    if text is not None:
        return _encoded_after_text(model.codec, text)
    # Some templates want results of tools to follow calls: these are rendered after the mark then,
    # and what is looked for begins with the token that ends the turn.
    answer = conversation.messages[num_answered - 1]
    text = _text_after_mark(model, conversation, num_answered, answer)
    tokens = [] if text is None else _encoded_after_text(model.codec, text)
    ends = [place for place, token in enumerate(tokens) if token in end_tokens]
    return tokens[ends[0] :] if ends else None


def joined(
    sampled: Sequence[int], following: Sequence[int], end_tokens: Collection[int]
) -> list[int]:
    """What comes after the sampled tokens: `following`, without the end of the turn where the
    sample has one. The one that was sampled stays, also where it is another end-of-sequence token
    than the template's; a sample that was cut off gets the template's."""
    has_end = bool(sampled) and sampled[-1] in end_tokens
    repeats = has_end and bool(following) and following[0] in end_tokens
    return list(following[1:] if repeats else following)


def _text_after_mark(
    model: TextModel, conversation: Conversation, num_answered: int, answer: Message
) -> str | None:
    """By a mark in place of the answer's text: what that was does not matter then."""
    mark = f"answer-{uuid.uuid4().hex}"
    messages = conversation.messages
    before, after = messages[: num_answered - 1], messages[num_answered:]
    marked = (*before, {**answer, "content": mark}, *after)
    try:
        text = model.rendered(replace(conversation, messages=marked))
    except InvalidRequest:
        return None
    _, separator, rest = text.partition(mark)
    return rest if separator and mark not in rest else None


def _encoded_after_text(codec: TextCodec, text: str) -> list[int]:
    """Tokenizers that put a blank before a text must not do so in the middle of one: it is encoded
    after a letter, whose tokens are dropped, unless that joins them."""
    tokens = codec.encode(text, bos=False)
    head = b"".join(codec.bytes_of(token) for token in tokens)[:1]
    if head != b" " or text.startswith(" "):
        return tokens
    anchored = codec.encode(_ANCHOR + text, bos=False)
    for place in range(1, min(3, len(anchored)) + 1):
        written = b"".join(codec.bytes_of(token) for token in anchored[:place])
        if written.strip() == _ANCHOR.encode():
            return anchored[place:]
    return tokens
