"""Ways tests make an engine draft: every round the same number of tokens, by any drafter."""

from collections.abc import Callable, Collection, Mapping, Sequence

from tests.embedded.tiny import ask, random_prompt, same
from tests.speculative.drafters.trial_drafters import trial_table
from tinkercloud.core.types import SampleOutput, SampleRequest
from tinkercloud.embedded.draft_training.files import frozen_rows
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.draft_length.rounds import Reason, Round
from tinkercloud.speculative.drafters.drafter import Draft, Drafter, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter
from tinkercloud.speculative.head.head import Head, HeadConfig, Params, initial_params
from tinkercloud.speculative.head.vocabulary import DraftVocabulary


class Watched(FixedLength):
    """Remembers the rounds that it is told of, and why it should have stopped."""

    def __init__(self, most: int):
        super().__init__(most)
        self.rounds: list[Round] = []
        self.stops: list[Reason] = []
        self.skipped_ms: list[float] = []

    def skipped(self, ms: float, num_sequences: int, *, usable: bool) -> None:
        self.skipped_ms.append(ms)

    def observe(self, last_round: Round) -> None:
        self.rounds.append(last_round)

    def stop(self, reason: Reason) -> None:
        self.stops.append(reason)

    @property
    def num_accepted(self) -> int:
        return sum(sum(told.accepted) for told in self.rounds)


class Drafting:
    """What a SamplingEngine takes; remembers the parts it made."""

    def __init__(self, make: Callable[[int], Drafter], most: int):
        self._make, self.policy = make, Watched(most)
        self.speculation: Speculation | None = None

    def __call__(self, base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        vocab_size = base.config.vocab_size
        drafter = GuardedDrafter(self._make(vocab_size), vocab_size)
        if drafter.layers:
            runner.capture(base, drafter.layers)
        self.speculation = Speculation(drafter, self.policy)
        return self.speculation


def untaught_head(base: BaseModel, says: Collection[int] | None = None) -> tuple[Head, Params]:
    """One that knows nothing. says: the tokens that it can draft, or None for all."""
    size = base.config.vocab_size
    vocabulary = DraftVocabulary.of(range(size) if says is None else says, size)
    config = HeadConfig.of(base.config)
    return Head(config, frozen_rows(base, vocabulary)), initial_params(config, 0)


# ---- what is sampled, and who knows it

Requests = Mapping[str, tuple[str, SampleRequest]]
LAWS = [(0.0, {}), (0.7, {}), (1.0, {}), (1.0, {"top_p": 0.9}), (0.7, {"top_k": 5, "top_p": 0.9})]


def mixture(version: str, batch: int, temperature: float, **more: object) -> Requests:
    return {
        str(i): (
            version,
            ask(
                random_prompt(5 + 7 * i, i), n=1 + i % 2, max_tokens=30 + i, seed=i,
                temperature=temperature, **more,
            ),
        )
        for i in range(batch)
    }  # fmt: skip


def all_same(found: Mapping[str, SampleOutput], expected: Mapping[str, SampleOutput]) -> None:
    for name, output in expected.items():
        same(found[name], output)
        reasons = [[s.stop_reason for s in one.sequences] for one in (found[name], output)]
        assert reasons[0] == reasons[1]


class Oracle(Drafter):
    """Knows how each sample goes on; errs at every `err_every`th token, where that is not 0."""

    def __init__(self, known: Sequence[Sequence[int]], err_every: int = 0):
        self._known = [list(tokens) for tokens in known]
        self._err_every = err_every

    name = "oracle"

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [self._draft(stream, most) for stream, most in requests]

    def _draft(self, stream: Stream, most: int) -> Draft:
        own = stream.tokens
        for tokens in self._known:
            if tokens[: len(own)] == own:
                going = tokens[len(own) : len(own) + most]
                if self._err_every:
                    going = [
                        (token + 1) % 256 if (len(own) + i) % self._err_every == 0 else token
                        for i, token in enumerate(going)
                    ]
                return Draft(tuple(going), (0.5,) * len(going))
        return Draft()


def named(name: str) -> Callable[[int], Drafter]:
    return lambda vocab_size: trial_table(vocab_size).make(name)


def knowing(outputs: Mapping[str, SampleOutput], requests: Requests, err_every: int) -> Oracle:
    known = []
    for name, output in outputs.items():
        prompt = requests[name][1].prompt.tolist()
        known += [[*prompt, *one.tokens.tolist()] for one in output.sequences]
    return Oracle(known, err_every)
