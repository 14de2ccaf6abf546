"""One tool call, `{"name": "f", "arguments": {...}}`, read from text that comes in pieces.

The arguments are passed on as they are written, so that a client sees them grow. They are the
model's own: what is no JSON within them stays so, as with other servers.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_NUMERIC_AND_WORDS = frozenset("0123456789+-.eEtrufalsn \t\r\n,:[]{}")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """name: of a call that begins here. arguments: the next characters of its JSON text."""

    name: str | None = None
    arguments: str = ""


class CallScanner:
    """names: only calls of these; empty: of any name."""

    def __init__(self, names: Collection[str] = ()):
        self._names = names
        self._object = _ObjectEnd()
        self._state = "head"
        self._unread = ""  # of the head

    def feed(self, text: str, *, until: str | None) -> tuple[list[CallPiece], str | None]:
        """(pieces, what follows the call; None: the call goes on). until: the text after a call;
        None: it ends with its JSON object."""
        pieces: list[CallPiece] = []
        if self._state == "head":
            text = self._read_head(text, until, pieces)
        if self._state == "arguments":
            text = self._read_arguments(text, pieces)
        if self._state == "tail":
            return pieces, self._read_tail(text, until)
        if self._state == "failed":
            return pieces, text
        return pieces, None

    def finish(self) -> str:
        """What was read and is no call; "" where one was found."""
        return self._unread if self._state in ("head", "failed") else ""

    def _read_head(self, text: str, until: str | None, pieces: list[CallPiece]) -> str:
        self._unread += text
        match = _HEAD.match(self._unread)
        if match is not None and self._is_known(match[1]):
            pieces.append(CallPiece(name=json.loads(match[1], strict=False)))
            rest, self._unread = self._unread[match.end() :], ""
            self._state = "arguments"
            return rest
        return self._whole_head(until, pieces)

    def _whole_head(self, until: str | None, pieces: list[CallPiece]) -> str:
        """A call that is written in another order can be read once it is whole."""
        if until is not None:
            place = self._unread.find(until)
            end = None if place < 0 else place
        else:
            end = _ObjectEnd().find(self._unread)
        if end is None:
            return ""
        body, rest = self._unread[:end], self._unread[end:]
        call = _call(body)
        if call is not None and (not self._names or call[0] in self._names):
            pieces.append(
                CallPiece(name=call[0], arguments=json.dumps(call[1], ensure_ascii=False))
            )
            self._unread, self._state = "", "tail"
            return rest if until is not None else "}" + rest
        self._unread, self._state = body, "failed"
        return rest if until is None else rest[len(until) :]

    def _read_arguments(self, text: str, pieces: list[CallPiece]) -> str:
        end = self._object.find(text)
        written = text if end is None else text[:end]
        if written:
            pieces.append(CallPiece(arguments=written))
        if end is None:
            return ""
        self._state = "tail"
        return text[end:]

    def _read_tail(self, text: str, until: str | None) -> str | None:
        self._unread += text
        place = self._unread.find("}" if until is None else until)
        if place < 0:
            # a call without its own end, with text behind it, must not swallow that
            return self._no_tail() if until is None and self._unread.strip() else None
        rest = self._unread[place + len(until or "}") :]
        self._unread = ""
        return rest

    def _no_tail(self) -> str:
        rest, self._unread = self._unread, ""
        return rest

    def _is_known(self, written: str) -> bool:
        try:
            name = json.loads(written, strict=False)
        except ValueError:
            return False
        return not self._names or name in self._names


class _ObjectEnd:
    """Looks for the end of a JSON object in pieces of its text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of this piece belong to the object, where it ends in it. It also
        ends before a character that no JSON has outside of its strings."""
        for place, character in enumerate(text):
            if self._in_string:
                self._read_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
            elif character not in _NUMERIC_AND_WORDS:
                return place
        return None

    def _read_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


def _call(text: str) -> tuple[str, Any] | None:
    """(name, arguments) of a whole call."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None
