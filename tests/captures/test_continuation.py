"""The tokens after a captured answer, for templates of several kinds."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.chat.model_folder import CHATML, SPECIAL
from tests.tokenizers_made import byte_level, words_in_pieces
from tinkercloud.captures.continuation import following_tokens, joined
from tinkercloud.chat.template import ChatTemplate
from tinkercloud.chat.text_model import Conversation, TextModel, TokenizerCodec
from tinkercloud.chat.tool_formats import tool_format

USER = {"role": "user", "content": "the three items"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
LAST_THINKS = (  # as Qwen3's: reasoning is kept in the last answer only
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ c | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
AFTER_CALLS = (  # as Mistral's: results of tools must follow a call
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% if m.tool_calls %}[CALLS]{{ m.tool_calls | tojson }}{% endif %}<|im_end|>"
    "{% else %}{% if not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}[RESULT]{{ m.content }}"
    "{% endif %}{% endfor %}{% if tools %}{{ tools }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def model(template: str) -> TextModel:
    tokenizer = byte_level(320, SPECIAL)
    codec = TokenizerCodec(tokenizer)
    return TextModel("m", codec, ChatTemplate(template), tool_format(template), None)


def ends(text: TextModel) -> set[int]:
    return set(text.codec.encode(SPECIAL[2], bos=False))


def following(text: TextModel, messages: Sequence[Any], num_answered: int) -> str:
    conversation = Conversation(tuple(messages))
    tokens = following_tokens(text, conversation, num_answered, ends(text))
    assert tokens is not None
    return text.codec._tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("template", [CHATML, LAST_THINKS, PLAIN], ids=["chatml", "qwen3", "plain"])
@pytest.mark.parametrize("answer", ["one two", "  one \n", "<think>\nhm\n</think>\n\none"])
def test_what_follows_does_not_depend_on_the_answer(template: str, answer: str):
    text = model(template)
    said = {"role": "assistant", "content": answer}
    plain = {"role": "assistant", "content": "x"}
    expected = text.rendered(Conversation((USER, plain, USER)))
    expected = expected[text.rendered(Conversation((USER, plain))).index("x", 30) + 1 :]
    assert following(text, [USER, said, USER], 2) == expected


def test_results_of_tools_follow_a_call_where_the_template_wants_one():
    text = model(AFTER_CALLS)
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3"}
    assert following(text, [USER, said, result], 2) == "<|im_end|>[RESULT]3"


def test_a_template_that_leaves_answers_out_gives_nothing_to_go_on_from():
    text = model("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    said = {"role": "assistant", "content": "one"}
    assert following_tokens(text, Conversation((USER, said, USER)), 2, ends(text)) is None


@pytest.mark.parametrize(
    ("sampled", "after", "expected"),
    [
        ([7, 2], [2, 9], [9]),
        ([7, 3], [2, 9], [9]),
        ([7], [2, 9], [2, 9]),
        ([7, 2], [9], [9]),
        ([], [2, 9], [2, 9]),
        ([7, 2], [], []),
    ],
    ids=["sampled end", "another end", "cut off", "no end in template", "empty", "nothing"],
)
def test_the_end_of_a_turn_comes_once(sampled: list[int], after: list[int], expected: list[int]):
    assert joined(sampled, after, {2, 3}) == expected


def test_tokenizers_that_put_a_blank_before_a_text_put_none_in_the_middle_of_one():
    codec = TokenizerCodec(words_in_pieces())
    text = TextModel("m", codec, ChatTemplate(PLAIN), tool_format(PLAIN), None)
    said = {"role": "assistant", "content": "one"}
    tokens = following_tokens(text, Conversation((USER, said, USER)), 2, ())
    assert tokens is not None
    written = b"".join(map(codec.bytes_of, tokens)).decode()
    assert written == "\nuser: the three items\nassistant:"
