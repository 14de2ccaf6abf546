"""What tests/gpu does on a GPU, on a CPU: nothing there is run for the first time."""

from pathlib import Path

import pytest

from tests.embedded.decode_scene import Traced
from tests.gpu import decode_bodies as bodies
from tinkercloud.decoding import device_scan
from tinkercloud.embedded.forward.decode_graphs import DrawGraphs
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner

CPU = "cpu"


def test_the_step_of_fixed_shapes_computes_what_the_plain_runner_does():
    ours, theirs = bodies.scene("Qwen3", CPU), bodies.scene("Qwen3", CPU)
    bodies.compare((ours, GraphRunner(None)), (theirs, TorchRunner()), 1e-4)


def test_adapters_loaded_later_are_served():
    assert bodies.other_adapters(CPU, GraphRunner(None)) == 0


def test_the_draw_on_the_device_is_the_plain_one():
    bodies.draws(CPU, device_scan.scan)


def test_the_draw_by_steps_of_fixed_shapes_is_the_plain_one():
    traced = Traced()
    bodies.draws(CPU, DrawGraphs(traced))
    assert traced.captured == 1, "rows of 16, at any temperature, with any seed"


def test_the_engine_samples_the_same_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    runner = GraphRunner(None, DrawGraphs(None))
    ours = bodies.sampled(folder, CPU, runner, monkeypatch)
    bodies.compare_sampled(ours, bodies.sampled(folder, CPU, TorchRunner(), monkeypatch))
