"""A tokenizer of a letter to a token, with a chat template, for the models of the simulation."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.simulation.image import scratch
from tests.simulation.schedule import VOCAB_SIZE

END = "<end>"
END_TOKEN = 2
"""What ends samples of the fake backend."""
LETTERS = "abdefghijk"
TEMPLATE = f"{{% for message in messages %}}{{{{ message.content }}}}{END}{{% endfor %}}"


@cache
def folder() -> Path:
    """Token 2 ends messages, the others are letters from a on."""
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(_names())}, unk_token="a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END)])
    made = scratch() / "tokenizer"
    made.mkdir()
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


def tokens_of(message: str) -> list[int]:
    """As the template writes it."""
    return [*map(_names().index, message), END_TOKEN]


def text_of(tokens: Iterable[int]) -> str:
    """Of a sample; ids beyond the letters have none."""
    return "".join(_names()[t] for t in tokens if t < VOCAB_SIZE and t != END_TOKEN)


def _names() -> list[str]:
    names = [chr(ord("a") + number) for number in range(VOCAB_SIZE)]
    names[END_TOKEN] = END
    return names
