"""A conversation whose turns reuse what target and drafters computed for those before."""

import threading
from typing import TYPE_CHECKING

from tinkercloud.chat.text_model import Conversation
from tinkercloud.errors import UserError
from tinkercloud.speculative.pipeline.loop import Writer, in_thread, run_speculative_loop
from tinkercloud.speculative.pipeline.result import PipelineResult
from tinkercloud.speculative.pipeline.text_sink import OnText, TextSink

if TYPE_CHECKING:
    from tinkercloud.speculative.pipeline.orchestrator import Orchestrator


class ConversationSession:
    """messages: what was said, in the form of chat templates. results: of each answer. One turn at
    a time. Use it as a context manager, or end it."""

    def __init__(self, orchestrator: "Orchestrator", system: str | None = None):
        self.messages: list[dict[str, str]] = []
        self.results: list[PipelineResult] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._orchestrator = orchestrator
        self._writer: Writer | None = None
        self._turn = threading.Lock()

    def generate(self, text: str, on_text: OnText | None = None) -> str:
        """The answer to a message. on_text: is called with each piece of it. Raises TargetGone,
        UserError; the conversation is then as before it, and can go on."""
        return self._answer(text, on_text, threading.Event())

    async def generate_async(self, text: str, on_text: OnText | None = None) -> str:
        """As `generate`; on_text is called in another thread."""
        return await in_thread(lambda stop: self._answer(text, on_text, stop))

    def end(self) -> None:
        """Frees what target and drafters keep of it. Can be called again; a later turn begins
        anew, with all that was said."""
        if self._writer is not None:
            self._writer.end()
            self._writer = None

    def __enter__(self) -> "ConversationSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _answer(self, text: str, on_text: OnText | None, stop: threading.Event) -> str:
        if not self._turn.acquire(blocking=False):
            raise UserError("the conversation has a turn already; wait for its end")
        try:
            self._orchestrator.connect_sync()
            messages = [*self.messages, {"role": "user", "content": text}]
            result = self._generated(messages, on_text, stop)
            self.messages = [*messages, {"role": "assistant", "content": result.text}]
            self.results.append(result)
            return result.text
        except BaseException:  # Ctrl-C too: the target's session has part of a turn
            self.end()
            raise
        finally:
            self._turn.release()

    def _generated(
        self, messages: list[dict[str, str]], on_text: OnText | None, stop: threading.Event
    ) -> PipelineResult:
        model = self._orchestrator.text
        prompt = model.prompt(Conversation(tuple(messages)))
        writer = self._writer_of(prompt)
        result = self._orchestrator.new_result(prompt, writer)
        sink = TextSink(model, result, on_text)
        try:
            run_speculative_loop(writer, result, self._orchestrator.options, stop, sink)
        finally:
            sink.finish()
        return result

    def _writer_of(self, prompt: list[int]) -> Writer:
        """The one of the turns before, where the prompt goes on from what that has: a template may
        write earlier answers in another way than they were sampled."""
        if self._writer is not None:
            tokens = self._writer.session.tokens
            if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                self._writer.append(prompt[len(tokens) :])
                return self._writer
            self.end()
        self._writer = self._orchestrator.new_writer(prompt)
        return self._writer
