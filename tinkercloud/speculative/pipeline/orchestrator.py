"""A target worker and the workers that draft for it, as one: texts in, texts out."""

import asyncio
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tinkercloud.addresses import parse_address
from tinkercloud.chat.text_model import TextModel
from tinkercloud.core.types import SamplingParams
from tinkercloud.errors import InvalidRequest
from tinkercloud.speculative.drafters.drafter import Stream
from tinkercloud.speculative.pipeline.conversation import ConversationSession
from tinkercloud.speculative.pipeline.loop import Writer, in_thread, run_speculative_loop
from tinkercloud.speculative.pipeline.options import PipelineOptions
from tinkercloud.speculative.pipeline.result import PipelineResult, write_telemetry
from tinkercloud.speculative.pipeline.target_session import TargetSession
from tinkercloud.speculative.pipeline.text_sink import OnText, TextSink
from tinkercloud.speculative.remote.connection import ClientSecurity
from tinkercloud.speculative.remote.link import GrpcLink
from tinkercloud.speculative.remote.messages import Target
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.speculative.remote.target_connection import TargetConnection
from tinkercloud.speculative.remote.target_messages import TargetModel

MAX_KEPT = 1000  # runs, for the telemetry


class Orchestrator:
    """target: "HOST:PORT" of a `tinkercloud target-worker`; draft: of a `tinkercloud draft-worker`,
    or several with commas, "" for none. security: of all of them.

    Use it as a context manager, or close it; the methods with `_sync` work everywhere, inside a
    running event loop too. What it yields is what the target alone would say.
    """

    def __init__(
        self,
        target: str,
        draft: str = "",
        options: PipelineOptions | None = None,
        security: ClientSecurity | None = None,
    ):
        """Raises ConfigError."""
        self.options = options or PipelineOptions()
        self.results: deque[PipelineResult] = deque(maxlen=MAX_KEPT)
        self._security = security or ClientSecurity()
        self._security.check()
        self._target = TargetConnection(
            parse_address(target), self._security, self.options.round_timeout_s
        )
        self._draft = [parse_address(part.strip()) for part in draft.split(",") if part.strip()]
        self._drafter: RemoteDrafter | None = None
        self._text: TextModel | None = None
        self._ids = count(1)
        self._lock = threading.Lock()

    # ---- connections

    async def connect(self) -> "Orchestrator":
        return await asyncio.to_thread(self.connect_sync)

    def connect_sync(self) -> "Orchestrator":
        """Nothing where it is connected. A drafter that does not answer is tried again by itself,
        and done without meanwhile. Raises TargetGone, ConfigError."""
        with self._lock:
            self._target.connect()
            if self._text is None:
                self._text = _text_model(self._target.model)
            if self._drafter is None and self._draft and self.options.drafted:
                target = _drafted_for(self._target.model)
                links = [GrpcLink(each, self._security, target) for each in self._draft]
                self._drafter = RemoteDrafter(links, self.options.draft_wait_s, target.vocab_size)
                self._drafter.wait_connected(1.0)
        return self

    async def close(self) -> None:
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """Sessions that are left end at the workers. Can be called again."""
        with self._lock:
            if self._drafter is not None:
                self._drafter.close()
                self._drafter = None
            self._target.close()

    def __enter__(self) -> "Orchestrator":
        return self.connect_sync()

    def __exit__(self, *_: object) -> None:
        self.close_sync()

    async def __aenter__(self) -> "Orchestrator":
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def model(self) -> str:
        """The target's name."""
        return self._target.model.name

    @property
    def text(self) -> TextModel:
        """The target's tokenizer and chat template."""
        assert self._text is not None, "not connected"
        return self._text

    # ---- runs

    async def run(self, prompt: str | Sequence[int], on_text: OnText | None = None) -> str:
        """The text only. Raises as `run_with_result`."""
        return (await self.run_with_result(prompt, on_text)).text

    async def run_with_result(
        self, prompt: str | Sequence[int], on_text: OnText | None = None
    ) -> PipelineResult:
        """prompt: a text, or token ids. on_text: is called with each piece of text, in another
        thread. Raises TargetGone, UserError with the target's reason, InvalidRequest."""
        return await in_thread(lambda stop: self._run(prompt, on_text, stop))

    def run_with_result_sync(
        self, prompt: str | Sequence[int], on_text: OnText | None = None
    ) -> PipelineResult:
        """As `run_with_result`; an interrupt (Ctrl-C) ends the session at the workers too."""
        return self._run(prompt, on_text, threading.Event())

    def run_again(self, result: PipelineResult, *, drafts: bool) -> PipelineResult:
        """The same prompt and seed once more, with drafts or without. Raises as
        `run_with_result_sync`."""
        self.connect_sync()
        writer = self.new_writer(list(result.prompt), result.params, drafts=drafts)
        return self._written(writer, list(result.prompt), None, threading.Event())

    def chat_session(self, system: str | None = None) -> ConversationSession:
        """system: what the model is told before the conversation."""
        return ConversationSession(self, system)

    def export_telemetry(self, path: Path | str) -> None:
        """Of the last thousand runs: their rounds, with the size of each draft's tree, and a trace
        that Chrome and Perfetto draw. Neither texts nor tokens are in it."""
        write_telemetry(list(self.results), Path(path))

    # ---- texts that are written

    def new_writer(
        self, prompt: list[int], params: SamplingParams | None = None, *, drafts: bool = True
    ) -> Writer:
        """Of a text that begins with those tokens; to be ended. params: None: by the options."""
        params = params or self.options.params()
        session = TargetSession(self._target, params, self.options.reconnect_s)
        session.tokens.extend(prompt)
        if self._drafter is None or not drafts:
            return Writer(session, None, None)
        number = next(self._ids)
        stream = Stream(number, number, "", 0, session.tokens, len(prompt), params, sample_index=0)
        self._drafter.begin(stream)
        return Writer(session, self._drafter, stream)

    def new_result(self, prompt: list[int], writer: Writer) -> PipelineResult:
        result = PipelineResult(prompt, writer.session.params)
        self.results.append(result)
        return result

    def _run(
        self, prompt: str | Sequence[int], on_text: OnText | None, stop: threading.Event
    ) -> PipelineResult:
        self.connect_sync()
        tokens = self._tokens(prompt)
        return self._written(self.new_writer(tokens), tokens, on_text, stop)

    def _written(
        self, writer: Writer, tokens: list[int], on_text: OnText | None, stop: threading.Event
    ) -> PipelineResult:
        result = self.new_result(tokens, writer)
        sink = TextSink(self.text, result, on_text)
        try:
            run_speculative_loop(writer, result, self.options, stop, sink)
        finally:
            writer.end()
            sink.finish()
        return result

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Raises InvalidRequest."""
        tokens = self.text.codec.encode(prompt, bos=True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InvalidRequest("the prompt is empty")
        return list(tokens)


def _text_model(model: TargetModel) -> TextModel:
    """Raises ConfigError."""
    if not model.tokenizer:
        return TextModel.of_folder(model.name, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in model.tokenizer.items():
            (folder / file).write_bytes(content)
        return TextModel.of_folder(model.name, folder)


def _drafted_for(model: TargetModel) -> Target:
    """The target, as draft workers get to know it."""
    tokenizer = model.tokenizer.get("tokenizer.json")
    return Target(
        model.name, model.digest, model.vocab_size, model.vocabulary_digest,
        None if tokenizer is None else tokenizer.decode(),
    )  # fmt: skip
