"""What a draft head sees of the target is the same whatever computes the pass."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.decoding.rows import row_params
from tests.embedded.decode_scene import Traced, version, with_weights
from tests.embedded.fake_streams import FakeStreams
from tests.embedded.forward.test_decode_graphs import Recorded
from tests.gpu import head_bodies as bodies
from tests.gpu.stream_bodies import mixed
from tinkercloud.decoding import device_scan
from tinkercloud.decoding.sampler import gumbel_noise_at
from tinkercloud.embedded.draft_training.capture import layer_outputs
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.batch import SequenceRows, ragged
from tinkercloud.embedded.forward.decode_graphs import DrawGraphs
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import GraphRunner, NativeRunner, Runner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling import base_states
from tinkercloud.embedded.sampling.cuda_streams import SingleStream, Streams
from tinkercloud.embedded.training.context import TrainContext

CPU = "cpu"
CLOSE = 1e-4
COMPILED = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
OTHERS = [
    pytest.param(TorchRunner, id="plain"),
    pytest.param(partial(GraphRunner, None, DrawGraphs(None)), id="fixed shapes"),
    pytest.param(lambda: GraphRunner(Recorded(), DrawGraphs(None)), id="graphs"),
]


# ---- of one pass


@COMPILED
@pytest.mark.parametrize("make", OTHERS)
def test_states_of_prompts_samples_and_drafts_in_one_batch_are_the_compiled_passs(
    base: BaseModel, make: Callable[[], Runner]
):
    theirs = bodies.of_mixed(with_weights(base, base.weights), NativeRunner(1))
    assert theirs.shape == (57, 2, base.config.hidden_size)
    bodies.compare([bodies.of_mixed(base, make())], [theirs], CLOSE)


@COMPILED
@pytest.mark.parametrize(
    "make",
    [*OTHERS, pytest.param(lambda: GraphRunner(Traced()), id="trace", marks=pytest.mark.slow)],
)
def test_states_of_a_decode_step_are_the_compiled_passs_and_outlive_the_next(
    base: BaseModel, make: Callable[[], Runner]
):
    ours = bodies.of_decoding(bodies.scene(base), make())
    packed = with_weights(base, base.weights)
    theirs = bodies.of_decoding(bodies.scene(packed), NativeRunner(1))
    bodies.compare(ours, theirs, CLOSE)


def test_a_layers_states_are_its_blocks_output(base: BaseModel):
    """Numbered from 1, the last one's after the final norm, in the order of `layers`."""
    adapted, ids = version(base, 4, 1), torch.arange(20)
    runner, pool = TorchRunner(), BlockPool(base.config, base.dtype, base.device, 4)
    runner.capture(base, (3, 1, 2))
    with torch.inference_mode():
        runner.forward(ragged([SequenceRows(adapted, ids.tolist(), 0, [0, 1], 1)]), pool)
        context = TrainContext(adapted.weights, [20], adapter=adapted.adapter, scale=adapted.scale)
        outputs = layer_outputs(adapted, context, ids)
    expected = torch.stack([outputs[2], outputs[0], outputs[1]], 1)
    bodies.compare([runner.captured], [expected], CLOSE)


def test_a_graph_is_captured_again_for_other_layers(llama: BaseModel):
    capture, held, plain = Recorded(), bodies.scene(llama), bodies.scene(llama)
    runner = GraphRunner(capture)
    for layers, captured in (((1, 3), 1), ((1, 3), 1), ((2,), 2), ((), 3)):
        ours = bodies.of_decoding(held, runner, layers)
        theirs = bodies.of_decoding(plain, TorchRunner(), layers)
        assert capture.captured == captured
        bodies.compare(ours, theirs, CLOSE)


@pytest.mark.parametrize("make", OTHERS)
def test_without_layers_no_states_are_kept(
    llama: BaseModel, make: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runners, "LayerStates", None)
    runner = make()
    assert bodies.of_mixed(llama, runner, ()).numel() == 0
    assert all(
        states.numel() == 0 for states in bodies.of_decoding(bodies.scene(llama), runner, ())
    )


# ---- in the engine


def using(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Runner]) -> None:
    monkeypatch.setattr(base_states, "runner_for", lambda base, num_threads: make())


def both(streams: FakeStreams) -> list[Streams]:
    return [SingleStream(), streams.parallel()]


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_head_sees_the_states_of_the_finished_text_and_changes_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Runner], temperature: float
):
    """Prompts of several chunks, scored ones, beside samples that are decoded and verified."""
    using(monkeypatch, make)
    load = mixed(temperature)
    plain = bodies.written(folder, CPU, load, SingleStream(), by_head=False)
    for streams in both(FakeStreams()):
        written = bodies.written(folder, CPU, load, streams)
        bodies.same_tokens(written, plain)
        assert written.head is not None
        assert len(written.head.shown) > 100
        bodies.check_what_was_shown(folder, written.head, CLOSE)


@COMPILED
@pytest.mark.parametrize("make", OTHERS)
def test_a_head_drafts_the_same_with_the_compiled_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Runner]
):
    load = bodies.short(temperature=1.0)
    using(monkeypatch, partial(NativeRunner, 1))
    native = bodies.written(folder, CPU, load, SingleStream())
    using(monkeypatch, make)
    for streams in both(FakeStreams()):
        written = bodies.written(folder, CPU, load, streams)
        assert written.head is not None and native.head is not None
        assert bodies.alike(written.head, native.head) > 0.99
        assert written.num_accepted > 0
        assert sum(map(len, written.head.drafts.values())) > 100


def test_noise_of_the_device_is_the_samplers():
    ids = torch.tensor([0, 5, 17, 299])
    rows = [row_params(seed=seed, sample_index=2, position=70) for seed in (0, 3, 2**64 - 1)]
    noise = device_scan.noise_at(torch.from_numpy(device_scan.packed(rows)), ids, 300)
    torch.testing.assert_close(noise, gumbel_noise_at(rows, ids), atol=2e-5, rtol=0)
