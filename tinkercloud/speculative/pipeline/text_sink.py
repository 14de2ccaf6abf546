"""A result's text, while its rounds come."""

from collections.abc import Callable

from tinkercloud.chat.text_model import TextModel
from tinkercloud.chat.token_text import TokenText
from tinkercloud.speculative.pipeline.result import PipelineResult, Round

OnText = Callable[[str], None]


class TextSink:
    """on_text: is called with each piece, whole characters only."""

    def __init__(self, text: TextModel, result: PipelineResult, on_text: OnText | None):
        self._text, self._result, self._on_text = TokenText(text.codec), result, on_text

    def __call__(self, each: Round) -> None:
        self._add(self._text.feed(each.tokens))

    def finish(self) -> None:
        self._add(self._text.finish())

    def _add(self, piece: str) -> None:
        self._result.text += piece
        if piece and self._on_text is not None:
            self._on_text(piece)
