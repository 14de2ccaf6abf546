"""CUDA graphs, Triton kernels and the draw on a GPU, against the plain forms and a CPU."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.embedded.decode_scene import FAMILIES
from tests.embedded.tiny import write_tiny_model
from tests.gpu import decode_bodies as bodies
from tinkercloud.decoding import device_scan
from tinkercloud.embedded.forward import kernel_choice
from tinkercloud.embedded.forward.decode_graphs import CudaCapture, DrawGraphs, Graphs, Kind
from tinkercloud.embedded.forward.kernel_choice import TOLERANCES, differences, has_kernels
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner

CUDA = "cuda"
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")


@pytest.fixture
def runner(caplog: pytest.LogCaptureFixture) -> Iterator[GraphRunner]:
    """One that captures; a capture that failed fails the test."""
    with caplog.at_level(logging.WARNING):
        capture = CudaCapture()
        made = GraphRunner(capture, DrawGraphs(capture))
        yield made
    assert not [r for r in caplog.records if "CUDA graphs" in r.message or "Triton" in r.message]
    assert sum(len(graphs) for _, graphs in made._graphs.values()) > 0


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kernel_computes_what_its_plain_form_does(dtype: torch.dtype):
    found = differences(torch.device(CUDA), dtype)
    assert max(found.values()) <= TOLERANCES[dtype], found
    assert has_kernels(torch.device(CUDA), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_the_plain_runner_does(family: str, runner: GraphRunner):
    ours, theirs = (bodies.scene(family, CUDA) for _ in range(2))
    bodies.compare((ours, runner), (theirs, TorchRunner()), 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_a_cpu_does(family: str, runner: GraphRunner):
    ours, theirs = bodies.scene(family, CUDA), bodies.scene(family, "cpu")
    bodies.compare((ours, runner), (theirs, TorchRunner()), 1e-3)


def test_in_bfloat16_they_differ_by_its_rounding(runner: GraphRunner):
    ours, theirs = (bodies.scene("Qwen3", CUDA, torch.bfloat16) for _ in range(2))
    bodies.compare((ours, runner), (theirs, TorchRunner()), 1e-1)


def test_graphs_without_our_kernels_compute_the_same(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: None)
    kernel_choice.has_kernels.cache_clear()
    try:
        ours, theirs = bodies.scene("Qwen3", CUDA), bodies.scene("Qwen3", "cpu")
        bodies.compare((ours, runner), (theirs, TorchRunner()), 1e-3)
    finally:
        kernel_choice.has_kernels.cache_clear()


def test_a_graph_serves_adapters_loaded_after_it(runner: GraphRunner):
    assert bodies.other_adapters(CUDA, runner) == 1


def test_graphs_are_captured_after_all_before_them_are_gone(caplog: pytest.LogCaptureFixture):
    capture, found = CudaCapture(), torch.zeros(3, device=CUDA)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graphs = Graphs(capture, "a sum")
            for _ in range(2):
                graphs.run(Kind(1, 1, -1), lambda: found.add_(torch.ones(3, device=CUDA)))
            assert len(graphs) == 1
            del graphs
    assert not caplog.records


def test_the_draw_on_a_gpu_is_the_plain_one():
    bodies.draws(CUDA, device_scan.scan)


def test_the_draw_by_graphs_is_the_plain_one():
    scan = DrawGraphs(CudaCapture())
    bodies.draws(CUDA, scan)
    assert len(scan._graphs) == 1, "rows of 16, at any temperature, with any seed"


def test_the_engine_samples_what_it_samples_on_a_cpu(
    runner: GraphRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_tiny_model(tmp_path)
    ours = bodies.sampled(folder, CUDA, runner, monkeypatch)
    bodies.compare_sampled(ours, bodies.sampled(folder, "cpu", TorchRunner(), monkeypatch))
