"""Epochs of RL with drafts and without: the rollouts of `benchmarks.speculation`.

A policy first learns the form of an answer, then goes over the same prompts again and again, with
an update after every epoch, so that drafts come from what its earlier versions wrote.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.lib.fixed_lengths import Hindsight, fixed
from tinkercloud.commands.bench import (
    AcceptanceSummary,
    EngineFactory,
    Workload,
    require_equal,
    run_timed,
    times_as_fast,
)
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromModel,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import choose_dtype, usable_cores
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, speculate
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import train_alone
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

KV_CACHE_BYTES = 2 * 1024**3
BASE, POLICY = "smollm2", "policy"
INSTRUCTION = "Add the numbers.\n"
LESSON_EXAMPLES = 16


class LocalModel:
    """The base model with its store of trained models, in this process."""

    def __init__(self, gguf: Path, scratch: Path):
        self.threads = usable_cores()
        torch.set_num_threads(self.threads)
        tokenizer = ensure_tokenizer_folder(gguf, scratch)
        self.dtype = choose_dtype("auto", torch.device("cpu"))
        self.base = BaseModel.load(BASE, gguf, tokenizer, self.dtype, torch.device("cpu"))
        versions = VersionCache(scratch / "versions", 2**30)
        self.store = ModelStore(lambda name: self.base, versions)
        self._speculate = speculate(
            DrafterSettings("suffix", None, self.threads, scratch, scratch / "drafts")
        )

    def engines(self, at_once: int) -> EngineFactory:
        assert self._speculate is not None
        return EngineFactory(at_once, KV_CACHE_BYTES, self.threads, self._speculate)

    def encode(self, text: str) -> list[int]:
        assert self.base.decoder is not None
        return self.base.decoder.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        assert self.base.decoder is not None
        return self.base.decoder.decode(tokens)


@dataclass(frozen=True)
class RlScale:
    """samples: of each prompt. at_once: how many are decoded together, each number in a run of its
    own. lessons: steps in which the policy learns the form of an answer. takes: engines of each
    kind, all of which go through all epochs."""

    epochs: int = 6
    prompts: int = 4
    samples: int = 8
    answer_tokens: int = 48
    at_once: tuple[int, ...] = (4, 8, 32)
    lessons: int = 6
    takes: int = 3


class Takes(list[list[float]]):
    """Seconds of each epoch, of each of its takes."""

    def sums(self, epochs: slice) -> list[float]:
        """Of each take."""
        return [sum(take) for take in zip(*self[epochs], strict=True)]

    def typical(self, epochs: slice) -> float:
        return median(self.sums(epochs))

    def times(self, other: "Takes", epochs: slice) -> float:
        """How many times as fast as the other."""
        return times_as_fast(self.sums(epochs), other.sums(epochs))


@dataclass
class Epochs:
    """Rollouts with so many at once, plain, with drafts and with drafts of fixed lengths, and their
    tokens. acceptance, fixed_acceptance: of all epochs together, of one take."""

    at_once: int
    plain_s: Takes = field(default_factory=Takes)
    drafted_s: Takes = field(default_factory=Takes)
    fixed_s: dict[int, Takes] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    acceptance: AcceptanceSummary | None = None
    fixed_acceptance: dict[int, AcceptanceSummary] = field(default_factory=dict)

    def times(self, first: int = 0, last: int | None = None) -> float:
        return self.drafted_s.times(self.plain_s, slice(first, last))

    def hindsight(self, first: int, last: int) -> Hindsight:
        """Of the epochs from `first` to before `last`."""
        some = slice(first, last)
        times = {length: s.times(self.plain_s, some) for length, s in self.fixed_s.items()}
        return Hindsight(times, self.fixed_acceptance)


@dataclass
class Rollouts:
    """Engines without drafts, with them, and with those of fixed lengths, some of each kind; all
    remember what they wrote."""

    plain: list[SamplingEngine]
    drafted: list[SamplingEngine]
    fixed: dict[int, list[SamplingEngine]]
    epochs: Epochs

    @classmethod
    def of(cls, engines: EngineFactory, at_once: int, takes: int) -> "Rollouts":
        def made(factory: EngineFactory) -> list[SamplingEngine]:
            return [factory.make() for _ in range(takes)]

        lengths = {length: made(factory) for length, factory in fixed(engines).items()}
        epochs = Epochs(at_once, fixed_s={length: Takes() for length in lengths})
        return cls(made(engines.plain()), made(engines), lengths, epochs)

    def run(self, workload: Workload) -> list[list[SampleOutput]]:
        """All engines' outputs; in every second take the last kind is first."""
        kinds = [
            (self.plain, self.epochs.plain_s),
            (self.drafted, self.epochs.drafted_s),
            *((engines, self.epochs.fixed_s[length]) for length, engines in self.fixed.items()),
        ]
        for _, seconds in kinds:
            seconds.append([])
        outputs = list[list[SampleOutput]]()
        for take in range(len(self.plain)):
            order = range(len(kinds))
            for kind in order if take % 2 else reversed(order):
                engines, seconds = kinds[kind]
                rollout = run_timed(engines[take], workload)
                outputs.append(rollout.outputs)
                seconds[-1].append(rollout.seconds)
        self.epochs.tokens.append(sum(len(s.tokens) for o in outputs[0] for s in o.sequences))
        return outputs

    def finish(self) -> Epochs:
        self.epochs.acceptance = _acceptance(self.drafted[0])
        self.epochs.fixed_acceptance = {k: _acceptance(each[0]) for k, each in self.fixed.items()}
        return self.epochs


def _acceptance(engine: SamplingEngine) -> AcceptanceSummary:
    return AcceptanceSummary.of(engine.speculation()[0][BASE])


class PolicyLoop:
    def __init__(self, model: LocalModel, scale: RlScale):
        self._model, self._scale = model, scale

    def run(self) -> list[Epochs]:
        """One for each number of samples at once."""
        scale, store = self._scale, self._model.store
        store.create_model(POLICY, BASE, LoraSpec(rank=16, seed=0))
        for lesson in range(scale.lessons):
            examples = [self._example(7 * lesson + i) for i in range(LESSON_EXAMPLES)]
            self._train(examples, "cross_entropy", 2e-3)
        runs = [
            Rollouts.of(self._model.engines(at_once), at_once, scale.takes)
            for at_once in scale.at_once
        ]
        for epoch in range(scale.epochs):
            version = store.version(store.publish(FromModel(POLICY)))
            self._epoch(epoch, Workload("epoch", version, tuple(self._questions(epoch))), runs)
        return [run.finish() for run in runs]

    def _epoch(self, epoch: int, workload: Workload, runs: Sequence[Rollouts]) -> None:
        outputs = [output for run in runs for output in run.run(workload)]
        for output in outputs[1:]:
            require_equal(f"epoch {epoch}", outputs[0], output)
        reward = self._learn(workload.requests, outputs[0])
        for run in runs:
            run.epochs.rewards.append(reward)
        times = ", ".join(f"{run.epochs.times(epoch):.2f}" for run in runs)
        at_once = self._scale.at_once
        print(
            f"epoch {epoch + 1}: {times} times with {at_once} at once, reward {reward:.2f}",
            file=sys.stderr,
            flush=True,
        )

    def _questions(self, epoch: int) -> Iterator[SampleRequest]:
        scale = self._scale
        for i in range(scale.prompts):
            text, _ = problem(100 + i)
            params = SamplingParams(
                scale.answer_tokens, 1000 * epoch + i, 1.0, stop_strings=("\n\n",)
            )
            prompt = np.array(self._model.encode(text), np.int32)
            yield SampleRequest(prompt, scale.samples, params)

    def _example(self, number: int) -> Datum:
        """A problem with its answer, which is what is trained on."""
        question, answer = problem(number)
        prompt, tokens = self._model.encode(question), self._model.encode(question + answer)
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = 1.0 / LESSON_EXAMPLES
        inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": weights}
        return Datum(np.array(tokens[:-1], np.int32), inputs)

    def _learn(self, requests: Sequence[SampleRequest], outputs: Sequence[SampleOutput]) -> float:
        """A step of GRPO. The mean reward: how much of the right answer a sample has."""
        data, rewards = [], []
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            group = np.array([self._reward(100 + i, s.tokens.tolist()) for s in output.sequences])
            rewards += group.tolist()
            for sequence, advantage in zip(output.sequences, group - group.mean(), strict=True):
                tokens = np.concatenate([request.prompt, sequence.tokens])
                before = np.zeros(len(request.prompt) - 1, np.float32)
                share = advantage / self._scale.samples
                advantages = np.full(len(sequence.tokens), share, np.float32)
                inputs = {
                    "target_tokens": tokens[1:].astype(np.int64),
                    "logprobs": np.concatenate([before, sequence.logprobs]).astype(np.float32),
                    "advantages": np.concatenate([before, advantages]),
                }
                data.append(Datum(tokens[:-1].astype(np.int32), inputs))
        self._train(data, "importance_sampling", 2e-4)
        return float(np.mean(rewards))

    def _reward(self, number: int, tokens: list[int]) -> float:
        text = self._model.decode(tokens).strip()
        answer = problem(number)[1].strip()
        same = sum(a == b for a, b in zip(text, answer, strict=False))
        return same / max(len(answer), len(text), 1)

    def _train(self, data: list[Datum], loss: str, rate: float) -> None:
        store = self._model.store
        train_alone(store.model(POLICY), TrainBatch(tuple(data), loss), Limits(1024))
        store.optim_step(POLICY, AdamParams(learning_rate=rate))


def problem(number: int) -> tuple[str, str]:
    """A question and its worked answer."""
    generator = np.random.default_rng(number)
    a, b, c = (int(x) for x in generator.integers(11, 90, 3))
    question = f"{INSTRUCTION}{a} + {b} + {c}\n"
    answer = (
        f"First, {a} + {b} = {a + b}.\nThen, {a + b} + {c} = {a + b + c}.\n"
        f"The answer is {a + b + c}.\n\n"
    )
    return question, answer
