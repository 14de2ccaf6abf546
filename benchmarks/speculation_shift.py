"""A draft head that follows its policy, through the server and the official SDK.

Supervised learning of a planted style makes a policy that the head does not know. After each step
every server samples the same prompts: one without drafts, one whose head follows the policy with
default settings, one whose head does not. All samples are compared, token by token, before a speed
is reported. `--picture` draws acceptance and tokens/s over the steps.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import ROOT, versions
from benchmarks.lib.processes import awake, prepare_process, signal_family
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
TIMES, LAST = 1.2, 4  # of plain, over so many last steps
ADJECTIVES = ("old", "silver", "quiet", "rusty", "golden", "salty", "broken", "drunken")
NOUNS = ("captain", "parrot", "anchor", "harbour", "cannon", "compass", "sailor", "barrel")
VERBS = ("watches", "steals", "guards", "follows", "buries", "carries")
COLUMNS = (
    *("steps", "server", "tokens/s", "times plain", "drafted tokens accepted"),
    *("drafted tokens", "drafts used", "drafts refused", "step s"),
    *("capture s", "training s", "in quiet time s", "drafting s"),
)


@dataclass(frozen=True)
class Scale:
    """samples: at once, each of a prompt of its own. data: examples of a step."""

    steps: int = 16
    samples: int = 4
    tokens: int = 64
    data: int = 8
    rate: float = 2e-3


QUICK = Scale(steps=2, samples=2, tokens=16, data=2)


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
class Curve:
    """By step. seconds: of its samples; step_s: of all that a client waits for. judged, accepted:
    drafted tokens. trainings: drafts used and refused, costs_s: what drafts have taken, up to
    then."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    trainings: list[dict[str, int]] = field(default_factory=list)
    costs_s: list[Costs] = field(default_factory=list)

    def per_s(self, steps: slice) -> float:
        num = sum(len(sample) for step in self.tokens[steps] for sample in step)
        return num / sum(self.seconds[steps])

    def acceptance(self, steps: slice) -> float | None:
        judged = sum(self.judged[steps])
        return sum(self.accepted[steps]) / judged if judged else None


class Policy:
    """One server's model, and what is measured of it."""

    def __init__(self, tinker: Any, server: Server, scale: Scale):
        self._tinker, self._server, self._scale = tinker, server, scale
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        self._model = service.create_lora_training_client(MODEL, rank=16, seed=0).result()
        self._tokenizer = self._model.get_tokenizer()
        self._before = (0, 0)
        self.curve = Curve()

    @property
    def pid(self) -> int:
        assert self._server.process is not None
        return self._server.process.pid

    def step(self, number: int) -> None:
        tinker, scale, curve = self._tinker, self._scale, self.curve
        generator = np.random.default_rng(number)
        data = [self._datum(styled(generator)) for _ in range(scale.data)]
        step_began = time.perf_counter()
        training = self._model.forward_backward(data, "cross_entropy")
        self._model.optim_step(tinker.AdamParams(learning_rate=scale.rate)).result()
        training.result()
        sampler = self._model.save_weights_and_get_sampling_client().result()
        params = [
            tinker.SamplingParams(
                max_tokens=scale.tokens, temperature=1.0, seed=100 * number + i, stop=[]
            )
            for i in range(scale.samples)
        ]
        prompt = tinker.ModelInput.from_ints(self._tokenizer.encode("The"))
        began = time.perf_counter()
        futures = [
            sampler.sample(prompt=prompt, num_samples=1, sampling_params=each) for each in params
        ]
        curve.tokens.append([list(future.result().sequences[0].tokens) for future in futures])
        ended = time.perf_counter()
        curve.seconds.append(ended - began)
        curve.step_s.append(ended - step_began)
        self._count()

    def _count(self) -> None:
        time.sleep(1.1)  # the engine reports once a second
        health = self._server.http().get("/health").json()
        speculation = health.get("speculation", {}).get(MODEL, {})
        records = speculation.get("drafters", {}).values()
        depths = [depth for record in records for depth in record["depths"]]
        counts = tuple(int(sum(d[name] for d in depths)) for name in ("verified", "accepted"))
        self.curve.judged.append(counts[0] - self._before[0])
        self.curve.accepted.append(counts[1] - self._before[1])
        self._before = (counts[0], counts[1])
        following = speculation.get("following", {})
        self.curve.trainings.append(following.get("trainings", {"used": 0, "refused": 0}))
        self.curve.costs_s.append(Costs.of(speculation))

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
        signal_family(server.process.pid if server.process else None, signal.SIGCONT)
        server.kill()  # what it would keep is in the way


def distil(data_dir: Path) -> Path:
    """A head for the base model, of its own samples; the folder of drafts."""
    command = [sys.executable, "-m", "tinkercloud", "draft", "train", "--model"]
    command += [f"{MODEL}={weights()}", "--data-dir", str(data_dir), "--raw"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return data_dir / "drafts"


def curves(drafts: Path, scale: Scale) -> dict[str, Curve]:
    """Each step on one server after the other, another one first each time, while the others are
    stopped: they would share the cores. Raises AssertionError where samples differ."""
    policies: dict[str, Policy] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        for name in FLAGS:
            server = stack.enter_context(serving(name, drafts, Path(scratch)))
            policies[name] = Policy(sdk_for(server), server, scale)
            signal_family(policies[name].pid, signal.SIGSTOP)
        for number in range(scale.steps):
            for name in rotated(list(FLAGS), number):
                with awake(policies[name]):
                    policies[name].step(number)
                rate = policies[name].curve.per_s(slice(number, number + 1))
                print(f"{name}, step {number + 1}: {rate:.1f} tokens/s", file=sys.stderr)
            tokens = [policy.curve.tokens[number] for policy in policies.values()]
            assert all(each == tokens[0] for each in tokens), f"step {number + 1}: other samples"
    return {name: policy.curve for name, policy in policies.items()}


def rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def rows(found: dict[str, Curve], scale: Scale) -> list[tuple[Cell, ...]]:
    third = max(scale.steps // 4, 1)
    parts = [slice(first, first + third) for first in range(0, scale.steps, third)]
    lines: list[tuple[Cell, ...]] = []
    for part in parts:
        plain = found[PLAIN].per_s(part)
        for name, curve in found.items():
            rate, trainings = curve.acceptance(part), curve.trainings[part][-1]
            before = curve.costs_s[part.start - 1] if part.start else Costs()
            lines.append(
                (
                    f"{part.start + 1} to {min(part.stop, scale.steps)}", name,
                    round(curve.per_s(part), 1), round(curve.per_s(part) / plain, 2),
                    "-" if rate is None else f"{rate:.0%}", sum(curve.judged[part]),
                    trainings["used"], trainings["refused"],
                    round(float(np.mean(curve.step_s[part])), 1),
                    *curve.costs_s[part][-1].since(before),
                )
            )  # fmt: skip
    return lines


def targets(found: dict[str, Curve]) -> list[Target]:
    last = slice(-LAST, None)
    times = found[FOLLOWING].per_s(last) / found[PLAIN].per_s(last)
    fixed = found[FIXED].per_s(last) / found[PLAIN].per_s(last)
    return [
        Target.at_least(f"{FOLLOWING}, last {LAST} steps: times plain", times, TIMES),
        Target.at_least(f"{FIXED}, last {LAST} steps: times plain", fixed, 0.95),
    ]


def draw(found: dict[str, Curve], path: Path) -> None:
    """A PNG: acceptance above, tokens/s below."""
    from matplotlib.figure import Figure

    colours = {FOLLOWING: "#2563eb", FIXED: "#d97706", PLAIN: "#9aa3af"}
    figure = Figure(figsize=(8.0, 5.6), dpi=130, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, curve in found.items():
        steps = range(1, len(curve.seconds) + 1)
        rates = [curve.acceptance(slice(i, i + 1)) for i in range(len(curve.seconds))]
        if name != PLAIN:
            shown = [np.nan if rate is None else 100 * rate for rate in rates]
            upper.plot(steps, shown, ".-", color=colours[name], label=name)
        speeds = [curve.per_s(slice(i, i + 1)) for i in range(len(curve.seconds))]
        lower.plot(steps, speeds, ".-", color=colours[name], label=name)
    upper.set_ylabel("drafted tokens accepted, %")
    lower.set_ylabel("tokens/s")
    lower.set_xlabel("steps of supervised learning to the planted style")
    lower.set_ylim(bottom=0)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
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
        about=about(ABOUT.format(scale=scale)),
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
{scale.samples} samples of {scale.tokens} tokens at temperature 1, together, then a second in which
nobody asks for anything. The draft head was made for the base model; all settings but the one that
is named are the defaults. Each step is made on one server after the other, another one first each
time, while the others are stopped; their samples are equal, token by token. *accepted*: of the
drafted tokens that were verified; where drafting does not pay, few are, as probes. *step*: all that
a client waits for, training, publication and samples. The last four columns are the seconds that
drafts took in these steps: hidden states copied out of the policy's passes, training beside the
policy's, both in quiet time, and drafting in rounds of samples.
"""

if __name__ == "__main__":
    main()
