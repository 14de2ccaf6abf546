"""Samples with drafts against the same samples without, by turns in one process.

Structured text one at a time, greedy; epochs of RL over the same prompts with a policy that learns
in between; many at once, where drafts do not pay; requests of all kinds as they come. Every sample
is compared, token by token and bit by bit, before a speed is reported.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from report import Cell, Report, versions
from smollm2 import weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tinkercloud.commands.bench import (  # noqa: E402
    PROSE,
    STRUCTURED,
    EngineFactory,
    Workload,
    compare,
    require_equal,
    run_timed,
)
from tinkercloud.core.types import (  # noqa: E402
    AdamParams,
    Datum,
    FromBase,
    FromModel,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from tinkercloud.embedded.drafting.step_costs import round_costs  # noqa: E402
from tinkercloud.embedded.forward.kv_blocks import BlockPool  # noqa: E402
from tinkercloud.embedded.forward.runners import runner_for  # noqa: E402
from tinkercloud.embedded.model.base_model import BaseModel  # noqa: E402
from tinkercloud.embedded.model.device import choose_dtype, settle, usable_cores  # noqa: E402
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, speculate  # noqa: E402
from tinkercloud.embedded.process.model_store import ModelStore  # noqa: E402
from tinkercloud.embedded.process.version_cache import VersionCache  # noqa: E402
from tinkercloud.embedded.sampling.engine import SamplingEngine  # noqa: E402
from tinkercloud.embedded.training.micro_batches import Limits  # noqa: E402
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder  # noqa: E402

KV_CACHE_BYTES = 2 * 1024**3
STRUCTURED_TIMES, LATER_TIMES, RUN_TIMES = 2.5, 1.5, 1.4
EVEN = (0.95, 1.05)
BEGINNING = "Add the numbers.\n"
STREAM, STREAM_BATCH, STREAM_LEVEL = "as they come", 32, 8
COLUMNS = (
    *("load", "temperature", "at once", "plain tokens/s", "with drafts tokens/s", "times"),
    *("tokens a pass", "drafting ms a pass", "verifying ms a pass"),
    *("plain p99 answer ms", "with drafts p99 answer ms"),
)


@dataclass(frozen=True)
class Scale:
    """tokens: of a structured sample. even_repeats: of prose, where a twentieth counts, which is
    what a machine wanders by; single_repeats of one sample, where a turn is half a second. most:
    samples at once. come: requests that come as they come, of up to twice `many_tokens`. Of the run
    of RL: epochs, prompts, samples of each, tokens of each, how many are decoded together, steps of
    the policy's schooling."""

    tokens: int = 256
    repeats: int = 3
    even_repeats: int = 5
    single_repeats: int = 15
    most: int = 128
    many_tokens: int = 48
    come: int = 64
    epochs: int = 10
    prompts: int = 4
    samples: int = 8
    answer_tokens: int = 48
    at_once: tuple[int, ...] = (4, 8)
    lessons: int = 6


QUICK = Scale(tokens=48, repeats=1, even_repeats=1, single_repeats=1, most=8, many_tokens=16,
              come=8, epochs=2, prompts=2, samples=4, answer_tokens=16, at_once=(8,),
              lessons=1)  # fmt: skip


@dataclass
class Epochs:
    """Seconds of each epoch's rollouts with so many at once, and their tokens."""

    at_once: int
    plain_s: list[float] = field(default_factory=list)
    drafted_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    told: dict[str, object] = field(default_factory=dict)

    def times(self, first: int = 0) -> float:
        return sum(self.plain_s[first:]) / sum(self.drafted_s[first:])


@dataclass
class Rollouts:
    """One engine without drafts and one with, which remember what they wrote."""

    plain: SamplingEngine
    drafted: SamplingEngine
    seen: Epochs

    @classmethod
    def of(cls, engines: EngineFactory, at_once: int) -> "Rollouts":
        return cls(engines.make(drafts=False), engines.make(drafts=True), Epochs(at_once))

    def take(self, case: Workload, epoch: int) -> list[list[SampleOutput]]:
        order = [(self.plain, self.seen.plain_s), (self.drafted, self.seen.drafted_s)]
        outputs = []
        for engine, seconds in order if epoch % 2 else order[::-1]:
            turn = run_timed(engine, case)
            outputs.append(turn.outputs)
            seconds.append(turn.seconds)
        self.seen.tokens.append(sum(len(s.tokens) for o in outputs[0] for s in o.sequences))
        return outputs

    def told(self) -> Epochs:
        self.seen.told = self.drafted.speculation()[0]["smollm2"]
        return self.seen


class Bench:
    def __init__(self, gguf: Path, scratch: Path, scale: Scale):
        self._scale = scale
        self.threads = usable_cores()
        torch.set_num_threads(self.threads)
        tokenizer = ensure_tokenizer_folder(gguf, scratch)
        dtype = choose_dtype("auto", torch.device("cpu"))
        self.base = BaseModel.load("smollm2", gguf, tokenizer, dtype, torch.device("cpu"))
        self._store = ModelStore(
            lambda name: self.base, VersionCache(scratch / "versions", 2**30), Limits(1024)
        )
        self._speculate = speculate(
            DrafterSettings("suffix", None, self.threads, scratch, scratch / "drafts")
        )
        assert self._speculate is not None
        self._version = self._store.version(self._store.publish(FromBase("smollm2")))
        runner = runner_for(self.base, self.threads)
        pool = BlockPool(self.base.config, dtype, self.base.device, 2048)
        self._table = round_costs(self.base, runner, pool, self.threads)
        settle()  # as the engine's process does

    def tokens(self, text: str) -> list[int]:
        assert self.base.decoder is not None
        return self.base.decoder.encode(text).ids

    def engines(self, at_once: int) -> EngineFactory:
        assert self._speculate is not None
        return EngineFactory(at_once, KV_CACHE_BYTES, self.threads, self._speculate)

    def costs(self) -> str:
        """How many times as long as a plain round one with so many drafted tokens each takes."""
        table, drafted = self._table, (1, 2, 4, 8)
        lines = [
            "| at once | plain round ms | " + " | ".join(f"{k} drafted" for k in drafted) + " |",
            "|---:|---:|" + "---:|" * len(drafted),
        ]
        for at_once in (1, 2, 4, 8, 16, 32):
            plain = table.plain_ms(at_once, 100.0)
            rows = np.array([at_once * (1 + k) for k in drafted], np.float64)
            ratios = table.verify_ms(rows, at_once, 100.0) / plain
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {at_once} | {plain:.1f} | {cells} |")
        return "\n".join(lines)

    # ---- loads

    def cases(self) -> Iterator[Workload]:
        scale = self._scale
        for name, text in STRUCTURED.items():
            yield Workload(name, self._version, (self._request(text, scale.tokens, 0, 0.0),))
        for at_once in (1, 8, 32, 128):
            if at_once <= scale.most:
                together = tuple(
                    self._request(PROSE, scale.many_tokens, seed, 1.0) for seed in range(at_once)
                )
                yield Workload("prose", self._version, together)
        yield self._stream()

    def _stream(self) -> Workload:
        """Texts of all kinds; as many tokens are asked for in a second as the machine writes with
        STREAM_LEVEL samples at once."""
        scale, coins = self._scale, np.random.default_rng(0)
        lengths = coins.integers(scale.many_tokens // 2, 2 * scale.many_tokens, scale.come)
        texts = (*STRUCTURED.values(), PROSE)
        requests = tuple(
            self._request(texts[i % len(texts)], int(tokens), i, 1.0)
            for i, tokens in enumerate(lengths)
        )
        token_s = 1e-3 * self._table.plain_ms(STREAM_LEVEL, 100.0) / STREAM_LEVEL
        gaps = coins.exponential(float(lengths.mean()) * token_s, scale.come)
        return Workload(STREAM, self._version, requests, tuple(np.cumsum(gaps).tolist()))

    def _request(self, text: str, tokens: int, seed: int, temperature: float) -> SampleRequest:
        params = SamplingParams(tokens, seed, temperature, use_eos=False)
        return SampleRequest(np.array(self.tokens(text), np.int32), 1, params)

    # ---- RL

    def rl(self) -> list[Epochs]:
        """The policy is taught the form of an answer, then goes over the same prompts again and
        again; rollouts with drafts and without take turns at being first."""
        scale = self._scale
        self._store.create_model("policy", "smollm2", LoraSpec(rank=16, seed=0))
        for lesson in range(scale.lessons):
            self._train([self._worked(7 * lesson + i) for i in range(16)], "cross_entropy", 2e-3)
        runs = [Rollouts.of(self.engines(at_once), at_once) for at_once in scale.at_once]
        for epoch in range(scale.epochs):
            version = self._store.version(self._store.publish(FromModel("policy")))
            case = Workload("epoch", version, tuple(self._questions(epoch)))
            outputs = [output for run in runs for output in run.take(case, epoch)]
            for output in outputs[1:]:
                require_equal(f"epoch {epoch}", outputs[0], output)
            reward = self._learn(case.requests, outputs[0])
            for run in runs:
                run.seen.rewards.append(reward)
            times = ", ".join(f"{run.seen.times(epoch):.2f}" for run in runs)
            print(
                f"epoch {epoch + 1}: {times} times with {scale.at_once} at once, reward "
                f"{reward:.2f}",
                file=sys.stderr,
                flush=True,
            )
        return [run.told() for run in runs]

    def _questions(self, epoch: int) -> Iterator[SampleRequest]:
        scale = self._scale
        for i in range(scale.prompts):
            text, _ = problem(100 + i)
            params = SamplingParams(
                scale.answer_tokens, 1000 * epoch + i, 1.0, stop_strings=("\n\n",)
            )
            yield SampleRequest(np.array(self.tokens(text), np.int32), scale.samples, params)

    def _worked(self, number: int) -> Datum:
        question, answer = problem(number)
        prompt, whole = self.tokens(question), self.tokens(question + answer)
        weights_ = np.zeros(len(whole) - 1, np.float32)
        weights_[len(prompt) - 1 :] = 1.0 / 16
        inputs = {"target_tokens": np.array(whole[1:], np.int64), "weights": weights_}
        return Datum(np.array(whole[:-1], np.int32), inputs)

    def _learn(self, requests: Sequence[SampleRequest], outputs: Sequence[SampleOutput]) -> float:
        """A step of GRPO. The mean reward: how much of the right answer a sample has."""
        data, rewards = [], []
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            own = np.array([self._reward(100 + i, one.tokens.tolist()) for one in output.sequences])
            rewards += own.tolist()
            for one, advantage in zip(output.sequences, own - own.mean(), strict=True):
                whole = np.concatenate([request.prompt, one.tokens])
                before = np.zeros(len(request.prompt) - 1, np.float32)
                share = advantage / self._scale.samples
                advantages = np.full(len(one.tokens), share, np.float32)
                inputs = {
                    "target_tokens": whole[1:].astype(np.int64),
                    "logprobs": np.concatenate([before, one.logprobs]).astype(np.float32),
                    "advantages": np.concatenate([before, advantages]),
                }
                data.append(Datum(whole[:-1].astype(np.int32), inputs))
        self._train(data, "importance_sampling", 2e-4)
        return float(np.mean(rewards))

    def _reward(self, number: int, tokens: list[int]) -> float:
        assert self.base.decoder is not None
        text = self.base.decoder.decode(tokens).strip()
        _, answer = problem(number)
        right = answer.strip()
        same = sum(a == b for a, b in zip(text, right, strict=False))
        return same / max(len(right), len(text), 1)

    def _train(self, data: list[Datum], loss: str, rate: float) -> None:
        for _ in self._store.forward_backward("policy", TrainBatch(tuple(data), loss)):
            pass
        self._store.optim_step("policy", AdamParams(learning_rate=rate))


def problem(number: int) -> tuple[str, str]:
    """A question and its worked answer."""
    generator = np.random.default_rng(number)
    a, b, c = (int(x) for x in generator.integers(11, 90, 3))
    question = f"{BEGINNING}{a} + {b} + {c}\n"
    answer = (
        f"First, {a} + {b} = {a + b}.\nThen, {a + b} + {c} = {a + b + c}.\n"
        f"The answer is {a + b + c}.\n\n"
    )
    return question, answer


def target(name: str, value: float, wanted: str, *, met: bool) -> dict[str, Cell]:
    return {"name": name, "value": round(value, 2), "target": wanted, "met": met}


def epoch_rows(seen: Epochs) -> list[tuple[Cell, ...]]:
    told = seen.told
    forwards = max(1, told["forwards"])  # type: ignore[type-var]
    found = []
    for name, first, last in (("RL, epoch 1", 0, 1), ("RL, later epochs", 1, None)):
        own = slice(first, last)
        tokens, plain, drafted = (
            sum(values[own]) for values in (seen.tokens, seen.plain_s, seen.drafted_s)
        )
        if plain:
            found.append(
                (
                    name, 1.0, seen.at_once, round(tokens / plain, 1),
                    round(tokens / drafted, 1), round(plain / drafted, 2),
                    round(float(told["tokens_per_sequence_forward"]), 2),  # type: ignore[arg-type]
                    round(told["ms"]["draft"] / forwards, 2),  # type: ignore[index]
                    round(told["ms"]["verify"] / forwards, 2),  # type: ignore[index]
                    "-", "-",
                )
            )  # fmt: skip
    return found


def epoch_goals(seen: Epochs) -> list[dict[str, Cell]]:
    found, epochs = [], len(seen.tokens)
    name = f"RL, {seen.at_once} at once"
    if epochs > 1:
        later = seen.times(1)
        goal, met = f">= {LATER_TIMES}", later >= LATER_TIMES
        found.append(target(f"{name}, epochs 2 and later: times plain", later, goal, met=met))
    goal, met = f">= {RUN_TIMES}", seen.times() >= RUN_TIMES
    return [*found, target(f"{name}, {epochs} epochs: times plain", seen.times(), goal, met=met)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--quick", action="store_true", help="short samples, two epochs")
    given = parser.parse_args()
    scale = QUICK if given.quick else Scale()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(weights(), Path(scratch), scale)
        costs = bench.costs()
        rows: list[tuple[Cell, ...]] = []
        goals: list[dict[str, Cell]] = []
        for case in bench.cases():
            repeats = scale.single_repeats if case.at_once == 1 else scale.even_repeats
            if case.name in STRUCTURED:
                repeats = scale.repeats
            name = f"{case.name}, {case.at_once} at once"
            at_once = case.at_once
            if case.arrivals_s:
                at_once = min(at_once, STREAM_BATCH)
                name = f"{case.at_once} requests {case.name}"
            outcome = compare(case, bench.engines(at_once), repeats)
            print(f"{name}: {outcome.times:.2f} times", file=sys.stderr, flush=True)
            told = outcome.cells()
            tails = (round(outcome.plain.p99_ms), round(outcome.drafted.p99_ms))
            which = (*told[:2], f"<= {at_once}" if case.arrivals_s else at_once)
            rows.append((*which, *told[3:7], *told[8:10], *tails))
            if case.name in STRUCTURED:
                met = outcome.times >= STRUCTURED_TIMES
                wanted = f">= {STRUCTURED_TIMES}"
                goals.append(target(f"{name}, greedy: times plain", outcome.times, wanted, met=met))
            else:
                wanted = f">= {EVEN[0]}" if case.at_once < 128 else f"{EVEN[0]} to {EVEN[1]}"
                met = outcome.times >= EVEN[0] and (case.at_once < 128 or outcome.times <= EVEN[1])
                goals.append(target(f"{name}: times plain", outcome.times, wanted, met=met))
        runs = bench.rl()
    for seen in runs:
        rows += epoch_rows(seen)
        goals += epoch_goals(seen)
    result = Report(
        title="Speculation",
        about=ABOUT.format(
            dtype=str(bench.base.dtype).removeprefix("torch."), scale=scale, costs=costs,
            rewards=", ".join(f"{one:.2f}" for one in runs[0].rewards),
            at_once=" and ".join(map(str, scale.at_once)), level=STREAM_LEVEL,
        ),
        command="python benchmarks/speculation.py" + (" --quick" if given.quick else ""),
        columns=COLUMNS,
        rows=rows,
        versions=versions("tinkercloud", "torch"),
        targets=goals,
    )  # fmt: skip
    print(f"{result.about}\n")
    result.publish(given.json)
    return 0


ABOUT = """\
SmolLM2-135M-Instruct in {dtype}, the suffix drafter under its policy, against the same engine
without drafts; turns alternate, the best of each counts. Before a speed is reported all tokens and
log-probabilities of both are compared, bit by bit. JSON, code and arithmetic: one sample of
{scale.tokens} tokens that goes on from such a text. Prose: one prompt, samples of
{scale.many_tokens} tokens. As they come: {scale.come} requests of all four kinds, of
{scale.many_tokens} tokens on average and a quarter more, by a Poisson process that asks for what
the machine writes with {level} at once; tokens/s until the last answer, an answer's time from its
request. Each of these turns begins with a drafter that has seen nothing. RL:
{scale.prompts} prompts with {scale.samples} samples of up to {scale.answer_tokens} tokens,
{at_once} decoded at once, {scale.epochs} epochs; the policy is a LoRA adapter of rank 16,
taught the form of an answer in {scale.lessons} steps, and is updated after every epoch, so that
drafts come from what earlier versions wrote; mean rewards {rewards}. *tokens a pass*: of each
sample, and of all epochs together.

What a round takes, as a multiple of a plain one (100 tokens of context): the best that drafts can
bring is their tokens a pass over this.

{costs}"""

if __name__ == "__main__":
    sys.exit(main())
