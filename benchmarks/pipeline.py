"""Drafts from another machine, by its distance: when they pay, and what overlap adds.

What is measured is `tinkercloud bench pipeline`, on SmolLM2.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.lib.arguments import BenchmarkParser
from benchmarks.lib.machine import versions
from benchmarks.lib.report import Report, Target, about
from benchmarks.lib.smollm2 import weights
from benchmarks.speculation_rl import LocalModel
from tinkercloud.commands.pipeline.measure import (
    ACCEPTED,
    COLUMNS,
    COST,
    DRAFTED,
    ROUND_TRIP,
    SECOND,
    PipelineBench,
    Point,
    Scale,
    threads_beside_worker,
)
from tinkercloud.commands.pipeline.worker_process import OVERLAPPED, SERIAL
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.model.device import freeze_garbage_collector, set_up_torch

TIMES = 1.2  # as fast as serial drafts, at a round trip of ROUND_TRIP passes
QUICK = Scale(tokens=24, repeats=1, round_trips_ms=(0, 20))
COLOURS = {"local": "#059669", SERIAL: "#d97706", OVERLAPPED: "#2563eb"}


def break_even_ms(points: Sequence[Point], name: str) -> float:
    """The round trip from which these drafts cost more than they save, between two that were
    measured; nan where that is none of them."""
    ordered = sorted(points, key=lambda point: point.round_trip_ms)
    for a, b in pairwise(ordered):
        before, after = a.times(name), b.times(name)
        if before >= 1 > after:
            share = (before - 1) / (before - after)
            return a.round_trip_ms + share * (b.round_trip_ms - a.round_trip_ms)
    return float("nan")


def draw(points: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
    ordered = sorted(points, key=lambda point: point.round_trip_ms)
    places = [point.round_trip_ms for point in ordered]
    axes.axhline(1, color="#6b7280", linewidth=1)
    axes.text(places[0], 1.01, "plain", color="#6b7280", ha="left", va="bottom")
    for name, colour in COLOURS.items():
        values = [point.times(name) for point in ordered]
        axes.plot(places, values, color=colour, marker="o", markersize=4, label=name)
        meets = break_even_ms(points, name)
        if meets == meets:
            axes.annotate(
                f"{meets:.0f} ms", (meets, 1), xytext=(4, 6), textcoords="offset points",
                color=colour,
            )  # fmt: skip
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xticks(places, [f"{round(place, 1):g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel="round trip to the draft worker, ms", ylabel="times the speed without drafts")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = BenchmarkParser("pipeline", __doc__, quick="short samples, two round trips")
    parser.add_argument("--plot", type=Path, help="draw the break-even curve here")
    parser.add_argument(
        "--farthest-ms", type=float, default=200.0, help="of the round trips that are measured"
    )
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    near = tuple(each for each in scale.round_trips_ms if each <= options.farthest_ms)
    scale = replace(scale, round_trips_ms=near)
    num_threads = threads_beside_worker()
    set_up_torch(num_threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = LocalModel(weights(), Path(scratch))
        version = model.store.version(model.store.publish(FromBase("smollm2")))
        freeze_garbage_collector()
        bench = PipelineBench(version, model.encode, num_threads, scale, Path(scratch))
        points = bench.points(lambda line: print(line, file=sys.stderr, flush=True))
    options.plot, plot = None, options.plot
    gained = points[0].times(OVERLAPPED, SERIAL)
    name = f"round trip of {ROUND_TRIP} passes: overlapped / serial"
    report = Report(
        title="Drafts from another machine",
        about=about(
            ABOUT.format(
                dtype=str(model.dtype).removeprefix("torch."), scale=scale, accepted=ACCEPTED,
                second=SECOND, cost=COST, drafted=DRAFTED, threads=num_threads,
                pass_ms=1e3 * bench.pass_s, serial=_shown(break_even_ms(points, SERIAL)),
                overlapped=_shown(break_even_ms(points, OVERLAPPED)),
            )
        ),
        command=parser.command(options),
        columns=COLUMNS,
        rows=[point.cells() for point in points],
        versions=versions("tinkercloud", "torch", "grpcio"),
        targets=[Target.at_least(name, gained, TIMES)],
    )  # fmt: skip
    report.publish(options.json, by_instruction_set=True)
    if plot is not None:
        draw(points, plot)


def _shown(ms: float) -> str:
    return f"at {ms:.0f} ms" if ms == ms else "at none of them"


ABOUT = """\
SmolLM2-135M-Instruct in {dtype} on {threads} core(s), one sample of {scale.tokens} tokens of prose
at temperature 1; a pass takes {pass_ms:.1f} ms. Drafts have {drafted} tokens in every round,
whether they pay or not. The drafter is scripted, since there is one machine: it sleeps {cost}
passes for each token, as a model of a tenth of the target's size would compute, drafts the target's
token in {accepted:.0%} of the places, and has it as its second choice in {second:.0%} of the
others. Several drafts in one batch take as long as one. *local*: it sleeps between the target's
passes. *serial*: it is behind gRPC in another process, through a relay that delays every byte by
half of the round trip, and prepares nothing. *overlapped*: the same worker with what it prepares,
eight outcomes a round. Relay and worker have the other core. Tokens and log-probabilities of every
run are compared with those of the first before a speed is reported; contenders alternate, the
fastest of {scale.repeats} runs each counts. *passes*: the round trip, in passes of the target with
one token. *prepared in time*: of the drafts, those that were there when they were asked for.

Drafts cost as much as they save: serial {serial}, overlapped {overlapped}."""

if __name__ == "__main__":
    main()
