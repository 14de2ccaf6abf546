"""A target whose next token follows from all tokens and the seed, and drafters that know it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from tinkercloud.core.types import SampledSequence, SampleOutput, SampleRequest
from tinkercloud.errors import UserError
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.remote.target_messages import TargetModel

VOCAB, EOS = 97, 96
MODEL = TargetModel("scripted", b"digest", VOCAB)


def next_token(tokens: Sequence[int], seed: int) -> int:
    digest = sha256(f"{list(tokens)} {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def logprob(tokens: Sequence[int]) -> float:
    return -float(sum(tokens) % 64) / 8


def plain(prompt: Sequence[int], seed: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """What the target says to a prompt."""
    tokens, logprobs = list(prompt), []
    while len(logprobs) < max_tokens:
        tokens.append(next_token(tokens, seed))
        logprobs.append(logprob(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :], logprobs


@dataclass(eq=False)
class ScriptedEngine:
    """Answers everything in one step. is_held: it computes nothing, so that jobs stay."""

    jobs: list[tuple[SampleRequest, Callable[[Any], None]]] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    is_held: bool = False
    fails: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.jobs) and not self.is_held

    def submit(self, request: SampleRequest, reply: Callable[[Any], None]) -> Any:
        if len(request.prompt) > 900:
            raise UserError("too long for the scripted target")
        self.jobs.append((request, reply))
        return self.jobs[-1]

    def cancel(self, job: Any) -> None:
        self.jobs.remove(job)
        job[1](UserError("the request was cancelled"))

    def step(self) -> None:
        if self.fails:
            raise RuntimeError("a secret of the machine")
        self.passes.append(len(self.jobs))
        jobs, self.jobs = self.jobs, []
        for request, reply in jobs:
            reply(_answer(request))

    def fail_all(self, error: BaseException) -> None:
        jobs, self.jobs = self.jobs, []
        for _, reply in jobs:
            reply(error)


def _answer(request: SampleRequest) -> SampleOutput:
    assert request.params.max_tokens is not None
    prompt = request.prompt.tolist()
    tokens, logprobs = plain(prompt, request.params.seed, request.params.max_tokens)
    end = 0
    while end < min(len(request.drafted), len(tokens)) and tokens[end] == request.drafted[end]:
        end += 1
    if request.drafted:  # it ends with the first token that was not drafted
        tokens, logprobs = tokens[: end + 1], logprobs[: end + 1]
    stopped = tokens[-1] == EOS
    found = SampledSequence(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop" if stopped else "length"
    )
    return SampleOutput(sequences=(found,))


class Knowing(Drafter):
    """Says what the target will; every `wrong`-th token it says is another one, 0: none."""

    name = "knowing"

    def __init__(self, wrong: int = 0):
        self.wrong, self.said = wrong, 0
        self.live: set[int] = set()
        self.begun = 0

    def begin(self, stream: Stream) -> None:
        self.live.add(stream.id)
        self.begun += 1

    def end(self, stream: Stream) -> None:
        self.live.remove(stream.id)

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(stream, (), most) for stream, most in requests]

    def propose_after(
        self, requests: Sequence[tuple[Stream, Sequence[int], int]], is_stale: Callable[[], bool]
    ) -> list[Draft]:
        return [self._draft(stream, after, most) for stream, after, most in requests]

    def _draft(self, stream: Stream, after: Sequence[int], most: int) -> Draft:
        tokens = [*stream.tokens, *after]
        begins = len(tokens)
        while len(tokens) < begins + most:
            token = next_token(tokens, stream.params.seed)
            self.said += 1
            if self.wrong and self.said % self.wrong == 0:
                token = (token + 1) % VOCAB
            tokens.append(token)
        drafted = tuple(tokens[begins:])
        seconds = tuple((token + 2) % VOCAB for token in drafted)
        return Draft(drafted, (0.9,) * most, seconds=seconds)
