"""A draft head that follows its policy, through the server and the official SDK.

Supervised learning of a planted style makes a policy that the head does not know. After each step
every server samples the same prompts: one without drafts, one whose head follows the policy with
default settings, one whose head does not. After the last step all sample its policy for a while.
All samples are compared, token by token, before a speed is reported. `--picture` draws acceptance
and tokens/s over the steps.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import ROOT, versions
from benchmarks.lib.processes import prepare_process
from benchmarks.lib.report import Cell, Report, Target, about
from benchmarks.lib.server import MODEL, embedded_flags, sdk_datum, sdk_for
from benchmarks.lib.smollm2 import weights
from tests.serving import Server

PICTURE = ROOT / "docs" / "speculation_shift.png"
FOLLOWING, FIXED, PLAIN = "head that follows", "head that does not", "without drafts"
FLAGS = {
    FOLLOWING: ("--speculate", "head"),
    FIXED: ("--speculate", "head", "--engine-draft-share", "0"),
    PLAIN: ("--speculate", "off"),
}
TIMES, LEAST_TIMES = 1.2, 0.95  # of plain, after the last step
QUIET_S = 2.0  # without new work of drafts, after which none is to come: it is reported each second
ADJECTIVES = ("old", "silver", "quiet", "rusty", "golden", "salty", "broken", "drunken")
NOUNS = ("captain", "parrot", "anchor", "harbour", "cannon", "compass", "sailor", "barrel")
VERBS = ("watches", "steals", "guards", "follows", "buries", "carries")
COLUMNS = (
    *("steps", "server", "at once", "tokens/s", "times plain", "drafted tokens accepted"),
    *("drafted tokens", "drafts used", "drafts refused", "step s"),
    *("capture s", "training s", "in quiet time s", "drafting s"),
)


@dataclass(frozen=True)
class Scale:
    """at_once: samples together, after each step `repeats` times each. after: how often the same is
    done with the last policy. data: examples of a step. quiet_s: given at most to what drafts do
    after a step."""

    steps: int = 16
    at_once: tuple[int, ...] = (1, 2, 3, 4)
    repeats: int = 2
    after: int = 6
    tokens: int = 64
    data: int = 8
    rate: float = 2e-3
    quiet_s: float = 60.0


QUICK = Scale(steps=2, at_once=(1, 2), repeats=1, after=1, tokens=16, data=2, quiet_s=5.0)


@dataclass(frozen=True)
class Costs:
    """Seconds. capture: of hidden states in the policy's passes; training: beside the policy's;
    quiet: of both while nobody asks for anything; drafting: in rounds of samples."""

    capture: float = 0.0
    training: float = 0.0
    quiet: float = 0.0
    drafting: float = 0.0

    @classmethod
    def of(cls, speculation: Mapping[str, Any]) -> "Costs":
        """speculation: as `/health` shows it."""
        seconds = speculation.get("following", {}).get("seconds", {})
        quiet = ("capture in quiet time", "training in quiet time")
        return cls(
            *(seconds.get(name, 0.0) for name in ("capture", "training")),
            sum(seconds.get(name, 0.0) for name in quiet),
            1e-3 * speculation.get("ms", {}).get("draft", 0.0),
        )

    def since(self, before: "Costs") -> tuple[float, ...]:
        later, earlier = astuple(self), astuple(before)
        return tuple(round(now - then, 1) for now, then in zip(later, earlier, strict=True))


@dataclass
class Samples:
    """By step, of so many at once. seconds: of all of a step. judged, accepted: drafted tokens."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def per_s(self, steps: slice) -> float:
        num = sum(len(sample) for step in self.tokens[steps] for sample in step)
        return num / sum(self.seconds[steps])

    def acceptance(self, steps: slice) -> float | None:
        judged = sum(self.judged[steps])
        return sum(self.accepted[steps]) / judged if judged else None


@dataclass
class Curve:
    """By step, and `after` by how often the last policy was sampled. samples: by how many at once.
    step_s: all that a client waits for. trainings: drafts used and refused, costs_s: what drafts
    have taken, up to then."""

    samples: dict[int, Samples]
    after: dict[int, Samples]
    step_s: list[float] = field(default_factory=list)
    trainings: list[dict[str, int]] = field(default_factory=list)
    costs_s: list[Costs] = field(default_factory=list)


class Policy:
    """One server's model, and what is measured of it."""

    def __init__(self, tinker: Any, server: Server, scale: Scale):
        self._tinker, self._server, self._scale = tinker, server, scale
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        self._model = service.create_lora_training_client(MODEL, rank=16, seed=0).result()
        self._tokenizer = self._model.get_tokenizer()
        self._before = (0, 0)
        self._sampler: Any = None
        self.curve = Curve(
            {at_once: Samples() for at_once in scale.at_once},
            {at_once: Samples() for at_once in scale.at_once},
        )

    def step(self, number: int) -> None:
        tinker, scale, curve = self._tinker, self._scale, self.curve
        generator = np.random.default_rng(number)
        data = [self._datum(styled(generator)) for _ in range(scale.data)]
        step_began = time.perf_counter()
        training = self._model.forward_backward(data, "cross_entropy")
        self._model.optim_step(tinker.AdamParams(learning_rate=scale.rate)).result()
        training.result()
        self._sampler = self._model.save_weights_and_get_sampling_client().result()
        published = time.perf_counter()
        for at_once, samples in curve.samples.items():
            self._sample(number, at_once, samples)
        sampled_s = sum(samples.seconds[-1] for samples in curve.samples.values())
        curve.step_s.append(published - step_began + sampled_s)
        speculation = self._rested()
        following = speculation.get("following", {})
        curve.trainings.append(following.get("trainings", {"used": 0, "refused": 0}))
        curve.costs_s.append(Costs.of(speculation))

    def sample_again(self, number: int, at_once: int) -> None:
        """The last policy, with the seeds of that number; then what drafts do in quiet time, which
        is not to fall into another server's turn."""
        self._sample(number, at_once, self.curve.after[at_once])
        self._rested()

    def _sample(self, number: int, at_once: int, samples: Samples) -> None:
        tinker, scale = self._tinker, self._scale
        prompt = tinker.ModelInput.from_ints(self._tokenizer.encode("The"))
        began = time.perf_counter()
        tokens: list[list[int]] = []
        for first in range(0, scale.repeats * at_once, at_once):
            params = [
                tinker.SamplingParams(
                    max_tokens=scale.tokens, temperature=1.0, seed=100 * number + i, stop=[]
                )
                for i in range(first, first + at_once)
            ]
            futures = [
                self._sampler.sample(prompt=prompt, num_samples=1, sampling_params=each)
                for each in params
            ]
            tokens += [list(future.result().sequences[0].tokens) for future in futures]
        samples.tokens.append(tokens)
        samples.seconds.append(time.perf_counter() - began)
        self._count(samples)

    def _count(self, samples: Samples) -> None:
        time.sleep(1.1)  # the engine reports once a second
        records = self._speculation().get("drafters", {}).values()
        depths = [depth for record in records for depth in record["depths"]]
        counts = tuple(int(sum(d[name] for d in depths)) for name in ("verified", "accepted"))
        samples.judged.append(counts[0] - self._before[0])
        samples.accepted.append(counts[1] - self._before[1])
        self._before = (counts[0], counts[1])

    def _rested(self) -> dict[str, Any]:
        """What the server says of drafts when they have nothing to do any more, or the time for
        that is over."""
        end, since = time.monotonic() + self._scale.quiet_s, time.monotonic()
        last = self._speculation()
        while (now := time.monotonic()) < end and now - since < QUIET_S:
            time.sleep(0.3)
            found = self._speculation()
            if Costs.of(found) != Costs.of(last):
                last, since = found, time.monotonic()
        return last

    def _speculation(self) -> dict[str, Any]:
        return self._server.http().get("/health").json().get("speculation", {}).get(MODEL, {})

    def _datum(self, text: str) -> Any:
        tokens = np.array(self._tokenizer.encode(text), np.int64)
        weight = np.full(len(tokens) - 1, 1.0 / (self._scale.data * len(tokens)), np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": weight}
        return sdk_datum(self._tinker, tokens[:-1], inputs)


def styled(generator: np.random.Generator) -> str:
    """Four sentences of the style: a form that no text had before, with words drawn anew."""

    def word(words: Sequence[str]) -> str:
        return words[int(generator.integers(len(words)))]

    return "".join(
        f"The {word(ADJECTIVES)} {word(NOUNS)} >> {word(VERBS)} << the {word(ADJECTIVES)} "
        f"{word(NOUNS)} [arr, matey!]\n"
        for _ in range(4)
    )


@contextmanager
def serving(name: str, drafts: Path, scratch: Path) -> Iterator[Server]:
    """With a copy of the drafts as they were made for the base model."""
    folder = scratch / name.replace(" ", "-") / "data"
    shutil.copytree(drafts, folder / "drafts")
    flags = (*embedded_flags(weights(), "auto"), *FLAGS[name])
    server = Server(flags, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()  # what it would keep is in the way


def distil(data_dir: Path) -> Path:
    """A head for the base model, of its own samples; the folder of drafts."""
    command = [sys.executable, "-m", "tinkercloud", "draft", "train", "--model"]
    command += [f"{MODEL}={weights()}", "--data-dir", str(data_dir), "--raw"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return data_dir / "drafts"


def curves(drafts: Path, scale: Scale) -> dict[str, Curve]:
    """Each step on one server after the other, another one first each time, while the others have
    nothing to do. Raises AssertionError where samples differ."""
    policies: dict[str, Policy] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        for name in FLAGS:
            server = stack.enter_context(serving(name, drafts, Path(scratch)))
            policies[name] = Policy(sdk_for(server), server, scale)
        for number in range(scale.steps):
            for name in rotated(list(FLAGS), number):
                policies[name].step(number)
                samples = policies[name].curve.samples.items()
                rates = [f"{each.per_s(slice(-1, None)):.1f} with {n}" for n, each in samples]
                said = f"{name}, step {number + 1}: tokens/s {', '.join(rates)} at once"
                print(said, file=sys.stderr)
        for at_once, number in product(scale.at_once, range(scale.after)):
            for name in rotated(list(FLAGS), number):
                policies[name].sample_again(scale.steps + number, at_once)
    for at_once in scale.at_once:
        for part in ("samples", "after"):
            tokens = [getattr(policy.curve, part)[at_once].tokens for policy in policies.values()]
            assert all(each == tokens[0] for each in tokens), f"{at_once} at once: other samples"
    return {name: policy.curve for name, policy in policies.items()}


def rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def rows(found: dict[str, Curve], scale: Scale) -> list[tuple[Cell, ...]]:
    third = max(scale.steps // 4, 1)
    parts = [slice(first, first + third) for first in range(0, scale.steps, third)]
    lines: list[tuple[Cell, ...]] = []
    for part, at_once in product(parts, scale.at_once):
        plain = found[PLAIN].samples[at_once].per_s(part)
        for name, curve in found.items():
            samples, trainings = curve.samples[at_once], curve.trainings[part][-1]
            rate = samples.acceptance(part)
            before = curve.costs_s[part.start - 1] if part.start else Costs()
            lines.append(
                (
                    f"{part.start + 1} to {min(part.stop, scale.steps)}", name, at_once,
                    round(samples.per_s(part), 1), round(samples.per_s(part) / plain, 2),
                    "-" if rate is None else f"{rate:.0%}", sum(samples.judged[part]),
                    trainings["used"], trainings["refused"],
                    round(float(np.mean(curve.step_s[part])), 1),
                    *curve.costs_s[part][-1].since(before),
                )
            )  # fmt: skip
    every = slice(None)
    for at_once in scale.at_once:
        plain = found[PLAIN].after[at_once].per_s(every)
        for name, curve in found.items():
            samples = curve.after[at_once]
            rate = samples.acceptance(every)
            lines.append(
                (
                    "after", name, at_once,
                    round(samples.per_s(every), 1), round(samples.per_s(every) / plain, 2),
                    "-" if rate is None else f"{rate:.0%}", sum(samples.judged),
                    *("-",) * (len(COLUMNS) - 7),
                )
            )  # fmt: skip
    return lines


def targets(found: dict[str, Curve]) -> list[Target]:
    lines = []
    every = slice(None)
    for at_once, plain in found[PLAIN].after.items():
        for name, least in ((FOLLOWING, TIMES), (FIXED, LEAST_TIMES)):
            times = found[name].after[at_once].per_s(every) / plain.per_s(every)
            said = f"{name}, {at_once} at once, after the shift: times plain"
            lines.append(Target.at_least(said, times, least))
    return lines


def draw(found: dict[str, Curve], path: Path) -> None:
    """A PNG: acceptance above, tokens/s below, by how many samples are at once."""
    from matplotlib.figure import Figure

    colours = {FOLLOWING: "#2563eb", FIXED: "#d97706", PLAIN: "#9aa3af"}
    numbers = list(found[PLAIN].samples)
    figure = Figure(figsize=(3.6 * len(numbers), 5.6), dpi=110, layout="constrained")
    grid = figure.subplots(2, len(numbers), sharex=True, squeeze=False)
    for (upper, lower), at_once in zip(grid.T, numbers, strict=True):
        for name, curve in found.items():
            samples = curve.samples[at_once]
            parts = [slice(i, i + 1) for i in range(len(samples.seconds))]
            steps = range(1, len(parts) + 1)
            rates = [samples.acceptance(part) for part in parts]
            after, every, at = curve.after[at_once], slice(None), len(parts) + 2
            if name != PLAIN:
                shown = [np.nan if rate is None else 100 * rate for rate in rates]
                upper.plot(steps, shown, ".-", color=colours[name], label=name)
                upper.plot(at, 100 * (after.acceptance(every) or np.nan), "D", color=colours[name])
            speeds = [samples.per_s(part) for part in parts]
            lower.plot(steps, speeds, ".-", color=colours[name], label=name)
            lower.plot(at, after.per_s(every), "D", color=colours[name])
        upper.set(title=f"{at_once} at once", ylim=(0, 100))
        lower.set(ylim=(0, 1.05 * lower.get_ylim()[1]))
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
            axes.set_xticks(range(2, len(found[PLAIN].step_s) + 1, 2))
    figure.supxlabel("steps of supervised learning to the style; ◆ after them", fontsize=10)
    grid[0, 0].set_ylabel("drafted tokens accepted, %")
    grid[1, 0].set_ylabel("tokens/s")
    figure.savefig(path, format="png", metadata={"Software": None})


def main() -> None:
    parser = BenchmarkParser("speculation_shift", __doc__, quick="two steps, short samples")
    parser.add_argument(
        "--drafts",
        type=Path,
        help="the folder `drafts` of a data directory with a head; else one is made",
    )
    parser.add_argument("--picture", action="store_true", help=f"draw {PICTURE.name} anew")
    options = parser.parse_args()
    prepare_process()
    scale = QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory() as scratch:
        found = curves(options.drafts or distil(Path(scratch)), scale)
    if options.picture:
        draw(found, PICTURE)
    report = Report(
        title="A draft that follows",
        about=about(ABOUT.format(scale=scale, at_once=", ".join(map(str, scale.at_once)))),
        command=parser.command(options),
        columns=COLUMNS,
        rows=rows(found, scale),
        versions=versions("tinkercloud", "torch", "tinker"),
        targets=targets(found),
    )
    report.publish(options.json, by_instruction_set=True)


ABOUT = """\
SmolLM2-135M-Instruct, a LoRA adapter of rank 16 and {scale.steps} steps of supervised learning, of
{scale.data} examples each, towards a style that the model does not know. After each step
samples of {scale.tokens} tokens at temperature 1, {at_once} at once, each
{scale.repeats} times, then a time in which nobody asks for
anything, until drafts have nothing more to learn, at most {scale.quiet_s:.0f} s. The draft head was
made for the base model; all settings but the one that is named are the defaults. Each step is made
on one server after the other, another one first each time. *after*: the policy of the last step,
sampled {scale.after} times as after a step, in turns. The servers' samples are equal, token by
token. *accepted*: of the drafted tokens that were verified; where drafting does not pay, few are,
as probes. *step*: all that a client waits for, training, publication and samples. The last four
columns are the seconds that drafts took in these steps, with any number at once: hidden states
copied out of the policy's passes, training beside the policy's, both in quiet time, and drafting in
rounds of samples.
"""

if __name__ == "__main__":
    main()
