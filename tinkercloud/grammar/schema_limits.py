"""What of a grammar is refused before it is compiled: what llguidance has no limit of its own for.

Its parser has limits for the depth of JSON, for the size of what is compiled and for the work of a
step (`compiler`). A `multipleOf` becomes an automaton with a state for each remainder, and none of
those limits counts these: 999983 took 9 s and 470 MB.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from tinkercloud.core.types import MAX_GRAMMAR_CHARACTERS, Grammar
from tinkercloud.errors import InvalidRequest

MAX_CHOICES = 4096
_MAX_REMAINDERS = 10_000


def checked_source(grammar: Grammar) -> Any:
    """The grammar's text, read: an expression, a schema, or a list of strings. Raises
    InvalidRequest."""
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"the grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are "
            "compiled"
        )
    if grammar.kind == "regex":
        return grammar.text
    try:
        source = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the grammar is not JSON: {error}") from None
    if grammar.kind == "choice":
        return _checked_choices(source)
    if not isinstance(source, dict | bool):
        raise InvalidRequest("a JSON schema is an object, true or false")
    _check_divisors(source)
    return source


def choices_expression(choices: Sequence[str]) -> str:
    """An expression that matches these texts alone, in the dialect of every grammar backend."""
    return "|".join(re.sub(r"([\\^$.|?*+()\[\]{}/-])", r"\\\1", choice) for choice in choices)


def _checked_choices(source: Any) -> list[str]:
    if not isinstance(source, list) or not 1 <= len(source) <= MAX_CHOICES:
        raise InvalidRequest(f"choices are a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in source):
        raise InvalidRequest("a choice is a string that is not empty")
    return source


def _check_divisors(schema: Any) -> None:
    # Several may hold for one number: their states multiply.
    product = math.prod(set(_divisors(schema)))
    if product > _MAX_REMAINDERS:
        raise InvalidRequest(
            f"the schema's multipleOf are too large together: their product is {product}, and "
            f"{_MAX_REMAINDERS} is the most that is compiled"
        )


def _divisors(node: Any) -> Iterator[int]:
    if isinstance(node, list):
        for each in node:
            yield from _divisors(each)
    elif isinstance(node, dict):
        divisor = node.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor):
            yield max(1, abs(Fraction(str(divisor)).numerator))
        for each in node.values():
            yield from _divisors(each)
