"""A conversation with a running server, and the commands that its user may type."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinkercloud.commands.generation.api_client import Answer, ApiClient, shown
from tinkercloud.commands.generation.draft_counts import DraftCounts, read_counts
from tinkercloud.commands.generation.draft_trainer import DraftTrainer
from tinkercloud.commands.options import say
from tinkercloud.errors import UserError

HELP = """/stats          tokens, speed and drafts of the last answer, and of all
/eval           the last answer again, with drafts and without: speeds, acceptance, same tokens
/train          train the draft on what was sampled, and wait for that
/model [NAME]   what answers; another base model, tinker:// path or sampling session
/models         what can be named
/clear          forget the conversation
/quit           end (or Ctrl-D)"""


def stats_line(answer: Answer, before: DraftCounts | None, after: DraftCounts | None) -> str:
    parts = [
        f"{answer.num_tokens} tokens in {answer.all_s:.2f} s",
        f"{answer.tokens_per_s:.1f} tokens/s",
        f"first after {answer.first_s:.2f} s",
    ]
    if before is not None and after is not None:
        parts.append(after.since(before).line)
    return "; ".join(parts)


@dataclass
class ServerChat:
    """messages: the conversation so far. fields: of every request."""

    client: ApiClient
    model: str
    fields: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    answers: list[Answer] = field(default_factory=list[Answer])
    last_stats: str = "no answer yet"

    def handle(self, line: str) -> bool:
        """One line of the user; False ends the chat. What the server refuses is said, and the chat
        goes on."""
        text = line.strip()
        try:
            if text in ("/quit", "/exit"):
                return False
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer(text)
        except UserError as error:
            say(f"[{error}]")
        return True

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "/stats": self._stats,
            "/eval": self._evaluate,
            "/train": self._train,
            "/models": lambda: say("\n".join(self.client.models())),
            "/clear": self._clear,
            "/help": lambda: say(HELP),
        }
        if name == "/model":
            self.model = argument.strip() or self.model
            say(f"[{self.model}]")
        elif name in commands:
            commands[name]()
        else:
            say(f"[{name} is no command]\n{HELP}")

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        before = read_counts(self.client)
        answer = Answer()
        try:
            for piece in self._pieces(self.model, messages, answer):
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:  # ends this answer, not the chat
            answer.finish_reason = "interrupted"
        sys.stdout.write("\n" if answer.finish_reason == "stop" else f" [{answer.finish_reason}]\n")
        sys.stdout.flush()
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        self.last_stats = stats_line(answer, before, read_counts(self.client))

    def _pieces(self, model: str, messages: list[dict[str, str]], answer: Answer) -> Any:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {**self.fields, "model": model, "messages": [*first, *messages]}
        return self.client.stream("chat/completions", body, answer)

    def _stats(self) -> None:
        say(f"[{self.last_stats}]")
        if self.answers:
            tokens = sum(each.num_tokens for each in self.answers)
            seconds = sum(each.all_s for each in self.answers)
            say(f"[{len(self.answers)} answers, {tokens} tokens in {seconds:.2f} s]")

    def _evaluate(self) -> None:
        """One seed, twice: speculation changes the time, and not the tokens."""
        if len(self.messages) < 2:
            raise UserError("there is no answer yet to evaluate drafts by")
        messages = self.messages[:-1]
        self.fields.setdefault("seed", 0)
        before = read_counts(self.client)
        drafted, plain = Answer(), Answer()
        for _ in self._pieces(self._sampler(speculate=True), messages, drafted):
            pass
        after = read_counts(self.client)
        for _ in self._pieces(self._sampler(speculate=False), messages, plain):
            pass
        say(f"[with drafts: {stats_line(drafted, before, after)}]")
        say(f"[without: {stats_line(plain, None, None)}]")
        same = "the same" if drafted.text == plain.text else "other"
        speed_up = drafted.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
        say(f"[{same} text; {speed_up:.2f} times as fast]")

    def _train(self) -> None:
        trainer = DraftTrainer.ask(self.client, self.model)
        say("[the draft is trained once the server has nothing else to do]")
        try:
            say(f"[{trainer.outcome()}]")
        except KeyboardInterrupt:  # ends the waiting, not the training
            say("[it is not waited for]")

    def _sampler(self, *, speculate: bool) -> str:
        """A sampling session of the model's weights."""
        if self.model.startswith("tinker://") or ":sample:" not in self.model:
            kind = "model_path" if "tinker://" in self.model else "base_model"
            name = self.model.rpartition(";")[2]
            body = {kind: name, "speculate": speculate}
            session = self.client.post("/api/v1/create_sampling_client", body)
            return str(session["sampling_session_id"])
        raise UserError("a sampling session drafts or not, as it was made; name its weights")

    def _clear(self) -> None:
        self.messages = []
        say("[cleared]")
