"""A draft head beside a target on a GPU: what it sees, and that it drafts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.decoding.rows import row_params
from tests.embedded.decode_scene import FAMILIES, random_base, tiny_config
from tests.embedded.tiny import write_tiny_model
from tests.gpu import head_bodies as bodies
from tests.gpu.stream_bodies import mixed
from tinkercloud.decoding import device_scan
from tinkercloud.decoding.sampler import gumbel_noise_at
from tinkercloud.embedded.forward.decode_graphs import CudaCapture, DrawGraphs
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner
from tinkercloud.embedded.sampling.cuda_streams import SingleStream

CUDA, CPU = "cuda", "cpu"
TOLERANCE = 1e-3  # of states: rows go by other kernels in other batches


@pytest.fixture
def runner(caplog: pytest.LogCaptureFixture) -> Iterator[GraphRunner]:
    """One that captures; a capture that failed fails the test."""
    with caplog.at_level(logging.WARNING):
        capture = CudaCapture()
        yield GraphRunner(capture, DrawGraphs(capture))
    assert not [r for r in caplog.records if "CUDA graphs" in r.message or "Triton" in r.message]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_pass_are_those_of_a_cpu(family: str, runner: GraphRunner):
    config = tiny_config(family)
    ours = bodies.of_mixed(random_base(config, device=CUDA), runner)
    assert ours.is_cuda
    bodies.compare([ours], [bodies.of_mixed(random_base(config), TorchRunner())], TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_graphs_are_those_of_a_cpu_and_outlive_the_next_replay(
    family: str, runner: GraphRunner
):
    config = tiny_config(family)
    held = bodies.scene(random_base(config, device=CUDA))
    plain = bodies.scene(random_base(config))
    for layers, graphs in (((1, 3), 1), ((2,), 1), ((), 1)):
        ours = bodies.of_decoding(held, runner, layers, count=8)
        theirs = bodies.of_decoding(plain, TorchRunner(), layers, count=8)
        bodies.compare(ours, theirs, TOLERANCE)
        assert sum(len(own) for _, own in runner._graphs.values()) == graphs


@pytest.mark.parametrize("load", [bodies.short(), mixed()], ids=["short", "mixed"])
def test_a_head_drafts_and_changes_no_token(folder: Path, load: bodies.Load):
    """In the device's streams; what it saw is what the finished texts give on a CPU."""
    plain = bodies.written(folder, CUDA, load, SingleStream(), by_head=False)
    found = bodies.written(folder, CUDA, load, None)
    bodies.same_tokens(found, plain)
    assert found.head is not None
    assert {tensor.device.type for tensor in found.head.params.values()} == {CUDA}
    assert found.num_accepted > 0
    bodies.check_what_was_shown(folder, found.head, TOLERANCE)


def test_a_head_drafts_what_it_drafts_on_a_cpu(folder: Path):
    load = bodies.short(temperature=1.0)
    here = bodies.written(folder, CPU, load, SingleStream())
    there = bodies.written(folder, CUDA, load, None)
    assert here.head is not None and there.head is not None
    assert bodies.alike(there.head, here.head) > 0.9


def test_noise_of_the_device_is_the_samplers():
    ids = torch.tensor([0, 5, 17, 299])
    rows = [row_params(seed=seed, sample_index=2, position=70) for seed in (0, 3, 2**64 - 1)]
    packed = torch.from_numpy(device_scan.packed(rows)).to(CUDA)
    found = device_scan.noise_at(packed, ids.to(CUDA), 300).cpu()
    torch.testing.assert_close(found, gumbel_noise_at(rows, ids), atol=2e-5, rtol=0)
