"""Reasoning in a sample's text: the text between <think> and </think>."""

from dataclasses import dataclass

from tinkercloud.chat.markers import held_back


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    opening: str
    closing: str


_THINK = ReasoningFormat("<think>", "</think>")


def reasoning_format(template: str) -> ReasoningFormat | None:
    """None: the model's template knows of no reasoning, and all of a sample is its answer."""
    return _THINK if _THINK.closing in template else None


class ReasoningParser:
    """Splits text as it comes into (reasoning, answer); the blanks around both are dropped.

    prompt_end: the end of the rendered prompt; templates may open the reasoning there."""

    def __init__(self, form: ReasoningFormat, prompt_end: str):
        self._form = form
        opened = prompt_end.rstrip().endswith(form.opening)
        self._state = "reasoning" if opened else "start"
        self._held = ""
        self._trims = True  # blanks at the beginning of a part

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        if self._state == "start":
            stripped = self._held.lstrip()
            if self._form.opening.startswith(stripped[: len(self._form.opening)]):
                if len(stripped) < len(self._form.opening):
                    return "", ""
                self._state, self._held = "reasoning", stripped[len(self._form.opening) :]
            else:
                self._state, self._trims = "answer", False
        if self._state == "reasoning":
            reasoning = self._reasoning()
        return reasoning, self._answer() if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self._state == "reasoning" else ("", rest)

    def _reasoning(self) -> str:
        before, closing, after = self._held.partition(self._form.closing)
        if closing:
            self._state, self._held = "answer", after
            text = self._untrimmed(before.rstrip())
            self._trims = True
            return text
        # blanks are held too: they are dropped where the closing follows
        keep = held_back(self._held, (self._form.closing,))
        whole = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(whole) :]
        return self._untrimmed(whole)

    def _answer(self) -> str:
        text, self._held = self._untrimmed(self._held), ""
        return text

    def _untrimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
