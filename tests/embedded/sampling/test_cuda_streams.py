"""Engine steps that prefill in parallel with drafting and verification, on fake streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embedded.decode_scene import FAMILIES, Traced, random_base, tiny_config, version
from tests.embedded.fake_streams import FakeStreams, Race, WatchedRunner
from tests.embedded.speculative_engine import Drafting
from tests.embedded.tiny import ask, random_prompt
from tests.gpu import stream_bodies as bodies
from tests.speculative.drafters.trial_drafters import DyingDrafter
from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.forward import contexts, paged_context, runners
from tinkercloud.embedded.forward.batch import SequenceRows, ragged
from tinkercloud.embedded.forward.decode_graphs import DrawGraphs
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import GraphRunner, NativeRunner, Runner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.uploads import uploaded
from tinkercloud.embedded.sampling import base_states, postprocessor
from tinkercloud.embedded.sampling.cuda_streams import (
    ParallelStreams,
    SingleStream,
    StreamRole,
    streams_for,
)
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.speculative.drafters.drafter import Drafter

CPU = "cpu"
COMPILED = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
RUNNERS = [
    pytest.param(TorchRunner, 1e-3, id="plain"),
    pytest.param(partial(GraphRunner, None, DrawGraphs(None)), 1e-3, id="fixed shapes"),
    pytest.param(partial(NativeRunner, 1), 0.0, id="compiled", marks=COMPILED),
]


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


def using(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Runner]) -> None:
    monkeypatch.setattr(base_states, "runner_for", lambda base, num_threads: make())


def watching(
    monkeypatch: pytest.MonkeyPatch, streams: FakeStreams, make: Callable[[], Runner]
) -> list[WatchedRunner]:
    """Runners that are made from now on; copies of blocks are watched too."""
    watched_runners: list[WatchedRunner] = []
    copy = BlockPool.copy

    def watched() -> WatchedRunner:
        watched_runners.append(WatchedRunner(make(), streams))
        return watched_runners[-1]

    def watched_copy(pool: BlockPool, source: int, target: int) -> None:
        watched_runners[-1].places.copied(source, target)
        copy(pool, source, target)

    using(monkeypatch, watched)
    monkeypatch.setattr(BlockPool, "copy", watched_copy)
    return watched_runners


# ---- what is sampled


@pytest.mark.parametrize(("make", "tolerance"), RUNNERS)
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(bodies.mixed(), id="mixed"),
        pytest.param(bodies.crowded(), id="crowded", marks=pytest.mark.slow),
    ],
)
def test_streams_change_no_token_and_no_keys_are_read_before_they_are_written(  # noqa: PLR0913
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    streams: FakeStreams,
    load: bodies.Load,
    make: Callable[[], Runner],
    tolerance: float,
):
    using(monkeypatch, make)
    plain = bodies.answered(folder, CPU, load, SingleStream())
    watched = watching(monkeypatch, streams, make)
    parallel = bodies.answered(folder, CPU, load, streams.parallel())
    bodies.compare(parallel, plain, tolerance)
    rows = watched[0].rows
    assert min(rows["prefill"]) > 1
    assert rows["verify"]
    assert not rows["main"]
    if load.most_drafted:
        assert parallel.num_accepted > 10
        reasons = {
            sequence.stop_reason for output in parallel.outputs for sequence in output.sequences
        }
        assert reasons == {"stop", "length"}
        hits = [output.prompt_cache_hit_tokens for output in parallel.outputs]
        assert any(hits) == watched[0].is_exact
    else:
        assert parallel.num_preempted > 0
        assert parallel.num_steps > 50


@COMPILED
def test_seeded_samples_are_the_same_to_the_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, streams: FakeStreams
):
    load = bodies.mixed(temperature=1.0)
    plain = bodies.answered(folder, CPU, load, SingleStream())
    watching(monkeypatch, streams, partial(NativeRunner, 1))
    bodies.compare(bodies.answered(folder, CPU, load, streams.parallel()), plain, 0.0)


def test_unjoined_streams_raise_a_race(
    folder: Path, monkeypatch: pytest.MonkeyPatch, streams: FakeStreams
):
    class Unjoined(ParallelStreams):
        @contextmanager
        def fork_join(self) -> Iterator[None]:
            self._main = streams.current
            yield

    watching(monkeypatch, streams, TorchRunner)
    parallel = streams.parallel()
    parallel.__class__ = Unjoined
    with pytest.raises(Race):
        bodies.answered(folder, CPU, bodies.mixed(), parallel)


# ---- the order of a step


class Noting(Drafter):
    def __init__(self, streams: FakeStreams):
        self._streams = streams

    def propose(self, requests):
        self._streams.note("drafts")
        return super().propose(requests)


class Bench:
    """An engine on fake streams, which log everything it does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, streams: FakeStreams):
        self.streams, sample = streams, postprocessor.sample
        self.base = BaseModel.load("tiny", folder, folder, torch.float32, torch.device(CPU))
        self.runners = watching(monkeypatch, streams, TorchRunner)

        def drawn(*args):
            streams.note("draw")
            return sample(*args)

        monkeypatch.setattr(postprocessor, "sample", drawn)
        drafting = Drafting(lambda _: Noting(streams), 2)
        self.engine = SamplingEngine(max_batch=8, kv_cache_bytes=2**24, speculate=drafting)
        self.engine.use_streams(streams.parallel())
        self.outcomes: list[SampleOutput | BaseException] = []

    def submit(self, length: int, seed: int, **more: object) -> None:
        request = ask(
            random_prompt(length, seed), max_tokens=9, use_eos=False, temperature=0.0, **more
        )
        self.engine.submit(version(self.base, None, 0), request, self.outcomes.append)

    def step(self) -> list[str]:
        """The log of one step."""
        self.streams.log.clear()
        self.engine.step()
        return list(self.streams.log)

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch, streams: FakeStreams) -> Bench:
    return Bench(folder, monkeypatch, streams)


def test_prefill_is_launched_first_and_its_logits_are_taken_last(bench: Bench):
    bench.submit(20, 1)
    bench.step()
    bench.submit(30, 2, prompt_logprobs=True)
    bench.submit(40, 3)
    assert bench.step() == [
        "prefill waits for main", "prefill: pass",
        "draft waits for main", "draft: drafts",
        "verify waits for main", "verify waits for draft", "verify: pass", "verify: draw",
        "prefill waits for main", "prefill waits for draft", "prefill waits for verify",
        "main waits for prefill", "main waits for draft", "main waits for verify",
        "main: draw",
    ]  # fmt: skip


def test_a_step_of_samples_alone_uses_no_prefill_stream(bench: Bench):
    bench.submit(20, 1)
    bench.step()
    assert [line for line in bench.step() if "prefill" in line] == []


def test_a_prompt_of_one_token_goes_with_the_samples(bench: Bench):
    bench.submit(1, 1)
    assert "verify: pass" in bench.step()
    bench.run()
    assert isinstance(bench.outcomes[0], SampleOutput)


def test_without_streams_a_step_is_one_pass(bench: Bench):
    bench.engine.use_streams(SingleStream())
    bench.submit(20, 1)
    bench.step()
    bench.submit(30, 2)
    assert bench.step() == ["main: drafts", "main: pass", "main: draw", "main: draw"]


def test_a_cpu_has_a_single_stream():
    assert not streams_for(torch.device(CPU)).are_parallel


# ---- errors on a stream


@pytest.mark.parametrize("num_good", [3, 12, 40])
def test_a_drafter_that_dies_on_its_stream_changes_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, streams: FakeStreams, num_good: int
):
    using(monkeypatch, TorchRunner)
    plain = bodies.answered(folder, CPU, bodies.mixed(), SingleStream())
    suffix = bodies.suffix
    monkeypatch.setattr(bodies, "suffix", lambda size: DyingDrafter(suffix(size), num_good))
    parallel = bodies.answered(folder, CPU, bodies.mixed(), streams.parallel())
    bodies.compare(parallel, plain, 1e-3)


@pytest.mark.parametrize("role", [StreamRole.PREFILL, StreamRole.VERIFY])
def test_after_a_failed_pass_all_streams_are_joined_and_the_engine_works(
    bench: Bench, role: StreamRole
):
    bench.submit(20, 1)
    bench.step()
    bench.submit(30, 2)
    bench.runners[0].fails_on = role.value
    with pytest.raises(RuntimeError, match="the pass failed") as error:
        bench.step()
    joined = {line for line in bench.streams.log if line.startswith("main waits for")}
    entered = {line.split(" waits")[0] for line in bench.streams.log if "waits for main" in line}
    assert joined == {f"main waits for {name}" for name in entered} >= {"main waits for prefill"}
    assert bench.streams.current.name == "main"
    bench.engine.fail_all(error.value)
    bench.runners[0].fails_on = None
    assert bench.outcomes == [error.value] * 2
    for seed in (1, 2):
        bench.submit(20 + seed, seed)
        bench.step()
    bench.run()
    answers = [each for each in bench.outcomes if isinstance(each, SampleOutput)]
    assert [len(each.sequences[0].tokens) for each in answers] == [9, 9]


def test_a_stream_outside_of_fork_join_is_refused(streams: FakeStreams):
    with (
        pytest.raises(AssertionError, match="outside of fork_join"),
        streams.parallel().on(StreamRole.DRAFT),
    ):
        pass


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_over_prompts_waits_for_no_result_and_for_no_copy(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU reading a number back would wait for the pass, and so would a plain copy to it."""
    base = random_base(tiny_config(family))
    plain, adapted = version(base, None, 0), version(base, 4, 1)
    pool = BlockPool(base.config, base.dtype, base.device, 20)
    sequences = [
        SequenceRows(adapted if i else plain, range(5 + i), 16 * i, pool.allocate(4), i % 2)
        for i in range(4)
    ]
    uploads, arrays = [], []
    from_numpy = torch.from_numpy
    for module in (paged_context, contexts):
        monkeypatch.setattr(module, "uploaded", lambda *a: uploads.append(1) or uploaded(*a))
    monkeypatch.setattr(torch, "from_numpy", lambda a: arrays.append(1) or from_numpy(a))
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch, "as_tensor", None)
    with Operations() as seen, torch.inference_mode():
        TorchRunner().forward(ragged(sequences), pool)
    waiting = [name for name in seen.names if any(bad in name for bad in Traced.FORBIDDEN)]
    assert seen.names and waiting == []
    assert len(uploads) == len(arrays) > 5


def test_what_is_uploaded_to_a_cpu_keeps_its_type_and_numbers():
    for values in ([3, 1, 2], []):
        array = torch.tensor(values, dtype=torch.int64).numpy()
        copy = uploaded(array, torch.device(CPU))
        assert copy.dtype == torch.int64
        assert copy.tolist() == values
