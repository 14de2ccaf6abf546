"""A conversation over workers, and the commands that its user may type."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud.commands.generation.api_client import shown
from tinkercloud.commands.options import Arguments, say
from tinkercloud.errors import UserError

if TYPE_CHECKING:
    from tinkercloud.speculative.pipeline.conversation import ConversationSession
    from tinkercloud.speculative.pipeline.orchestrator import Orchestrator

HELP = """/stats   tokens, speed and drafts of the last answer, and of all
/eval    the last answer again, with drafts and without: speeds, acceptance, same tokens
/clear   forget the conversation
/quit    end (or Ctrl-D)"""


@dataclass(slots=True)
class WorkerChat:
    """telemetry: where the rounds of all answers are written at the end, if anywhere."""

    pipeline: "Orchestrator"
    session: "ConversationSession"
    system: str | None
    telemetry: Path | None

    @classmethod
    def of(cls, pipeline: "Orchestrator", arguments: Arguments) -> "WorkerChat":
        system = arguments["system"]
        return cls(pipeline, pipeline.chat_session(system), system, arguments["telemetry"])

    def __enter__(self) -> "WorkerChat":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()
        if self.telemetry is not None:
            self.pipeline.export_telemetry(self.telemetry)

    def handle(self, line: str) -> bool:
        """One line of the user; False ends the chat. What fails is said, and the chat goes on."""
        text = line.strip()
        try:
            if text in ("/quit", "/exit"):
                return False
            if text == "/stats":
                self._stats()
            elif text == "/eval":
                self._evaluate()
            elif text == "/train":
                say("[workers learn from a server: `tinkercloud serve --draft-remote-model PATH`]")
            elif text == "/clear":
                self.session.end()
                self.session = self.pipeline.chat_session(self.system)
                say("[cleared]")
            elif text.startswith("/"):
                say(HELP)
            elif text:
                self._answer(text)
        except UserError as error:
            say(f"[{error}]")
        except KeyboardInterrupt:  # ends this answer, not the chat
            say(" [interrupted]")
        return True

    def _answer(self, text: str) -> None:
        self.session.generate(text, _write)
        reason = self.session.results[-1].finish_reason
        _write("\n" if reason == "stop" else f" [{reason}]\n")

    def _stats(self) -> None:
        results = self.session.results
        if not results:
            say("[no answer yet]")
            return
        say(f"[{results[-1].summary}]")
        tokens = sum(len(each.tokens) for each in results)
        seconds = sum(each.wall_s for each in results)
        say(f"[{len(results)} answers, {tokens} tokens in {seconds:.2f} s]")

    def _evaluate(self) -> None:
        """One seed, twice: drafts change the time, and not the tokens."""
        if not self.session.results:
            raise UserError("there is no answer yet to evaluate drafts by")
        last = self.session.results[-1]
        drafted = self.pipeline.run_again(last, drafts=True)
        plain = self.pipeline.run_again(last, drafts=False)
        say(f"[with drafts: {drafted.summary}]")
        say(f"[without: {plain.summary}]")
        same = "the same" if drafted.tokens == plain.tokens else "other"
        speed_up = drafted.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
        say(f"[{same} text; {speed_up:.2f} times as fast]")


def _write(piece: str) -> None:
    sys.stdout.write(shown(piece))
    sys.stdout.flush()
