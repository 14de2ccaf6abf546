"""How models write tool calls, found by their chat template; parsers for text as it comes.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.
Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several joined by `;`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinkercloud.chat.call_scanner import CallPiece, CallScanner
from tinkercloud.chat.markers import held_back

PYTHON_TAG = "<|python_tag|>"
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class ToolParser(Protocol):
    """Takes a sample's text in pieces, gives content (text) and pieces of calls in their order."""

    def feed(self, text: str) -> list["str | CallPiece"]: ...

    def finish(self) -> list["str | CallPiece"]:
        """What was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """is_of: whether a template speaks it. opening: what comes before the JSON object of a call.
    arguments: the name of a call's arguments. spoken: special tokens that are part of its text."""

    name: str
    is_of: Callable[[str], bool]
    parser: Callable[[Collection[str]], ToolParser]
    opening: str
    arguments: str
    spoken: tuple[str, ...] = ()


class _SteppingParser(ABC):
    """Text is held until it is clear what it belongs to; each step takes some of what is held."""

    def __init__(self) -> None:
        self._held = ""
        self._scanner: CallScanner | None = None

    def feed(self, text: str) -> list[str | CallPiece]:
        self._held += text
        pieces: list[str | CallPiece] = []
        while self._step(pieces):
            pass
        return pieces

    @abstractmethod
    def _step(self, pieces: list[str | CallPiece]) -> bool:
        """One move over what is held; whether there may be another."""

    def _scan(
        self, scanner: CallScanner, pieces: list[str | CallPiece], until: str | None
    ) -> tuple[str, bool]:
        """Feed the call that is underway. What the scanner gave back at its end, and whether it
        has ended; what comes after it is held."""
        scanned, rest = scanner.feed(self._held, until=until)
        pieces += scanned
        self._held = rest or ""
        if rest is None:
            return "", False
        self._scanner = None
        return scanner.finish(), True


class HermesParser(_SteppingParser):
    """Calls between tags. Text between the tags that is no call stays content."""

    def __init__(self, names: Collection[str] = ()):
        super().__init__()
        self._has_calls = False

    def finish(self) -> list[str | CallPiece]:
        rest, self._held = self._held, ""
        if self._scanner is None:
            is_part = rest if not self._has_calls else rest.strip()  # not blanks after a call
            return [rest] if is_part else []
        unread = self._scanner.finish()
        return [f"{_OPENING}{unread}"] if unread else []

    def _step(self, pieces: list[str | CallPiece]) -> bool:
        if self._scanner is None:
            return self._find_opening(pieces)
        unread, has_ended = self._scan(self._scanner, pieces, _CLOSING)
        if unread:
            pieces.append(f"{_OPENING}{unread}{_CLOSING}")
        return has_ended

    def _find_opening(self, pieces: list[str | CallPiece]) -> bool:
        before, opening, after = self._held.partition(_OPENING)
        if opening:
            self._scanner, self._held = CallScanner(), after
            self._has_calls = True
            if before.strip():  # line breaks before a call are part of its form
                pieces.append(before.rstrip())
            return True
        # blanks wait too: a call may follow
        keep = held_back(before, (_OPENING,))
        ready = before[: len(before) - keep].rstrip()
        self._held = before[len(ready) :]
        if ready:
            pieces.append(ready)
        return False


class Llama3Parser(_SteppingParser):
    """A call where the answer begins with one; any other answer is content."""

    def __init__(self, names: Collection[str] = ()):
        super().__init__()
        self._names = frozenset(names)
        self._is_content = False

    def finish(self) -> list[str | CallPiece]:
        rest, self._held = self._held, ""
        unread = self._scanner.finish() if self._scanner is not None else ""
        text = unread + rest
        return [text] if text.strip(" \n;") else []

    def _step(self, pieces: list[str | CallPiece]) -> bool:
        if self._is_content:
            self._give_up(pieces, self._held)
            return False
        if self._scanner is None:
            return self._find_call(pieces)
        unread, has_ended = self._scan(self._scanner, pieces, until=None)
        if unread:
            self._give_up(pieces, unread + self._held)
        return has_ended and not unread

    def _find_call(self, pieces: list[str | CallPiece]) -> bool:
        text = self._held.lstrip(" \n;")
        if not text or (len(text) < len(PYTHON_TAG) and PYTHON_TAG.startswith(text)):
            return False
        call = text.removeprefix(PYTHON_TAG).lstrip()
        if not call:
            return False
        if not call.startswith("{"):
            self._give_up(pieces, self._held)
            return False
        self._scanner, self._held = CallScanner(self._names), call
        return True

    def _give_up(self, pieces: list[str | CallPiece], text: str) -> None:
        self._is_content, self._held = True, ""
        if text:
            pieces.append(text)


FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "hermes",
        # Qwen's coder models write `<function=NAME>` between these tags instead of JSON
        lambda template: _OPENING in template and "<function=" not in template,
        HermesParser,
        opening=f"{_OPENING}\n",
        arguments="arguments",
    ),
    ToolFormat(
        "llama3",
        lambda template: PYTHON_TAG in template or '"parameters"' in template,
        Llama3Parser,
        opening="",
        arguments="parameters",
        spoken=(PYTHON_TAG,),
    ),
)
HERMES = FORMATS[0]


def tool_format(template: str) -> ToolFormat | None:
    """The format that a template with tools speaks; None: one that is not known here."""
    return next((form for form in FORMATS if form.is_of(template)), None)
