"""The decode step of fixed shapes computes what the plain runner does, whoever shares its batch."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.embedded import float64_decoder
from tests.embedded.decode_scene import (
    Scene,
    Traced,
    random_base,
    steps,
    tiny_config,
    version,
)
from tests.embedded.tiny import Sampler, ask, random_prompt, tuned
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.forward.adapter_bank import NO_ADAPTER, AdapterBank
from tinkercloud.embedded.forward.decode_graphs import BUCKETS, MAX_ROWS, bucket_for, width_for
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import base_states

LENGTHS = [1, 15, 16, 40, 129, 7, 300, 33, 2, 90, 17]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def several(base: BaseModel) -> list[tuple[Version, int]]:
    """Eleven rows: the base between adapters of different ranks and modules."""
    return [
        (version(base, 4, 1), 3),
        (version(base, None, 0), 2),
        (version(base, 11, 2, unembed=False), 5),
        (version(base, 8, 3), 1),
    ]


def agree(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for logits, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(logits, expected, **CLOSE)


def both(make: Callable[[], Scene], count: int = 4) -> tuple[Scene, Scene]:
    """The same steps by the graph runner and by the plain one."""
    ours, theirs = make(), make()
    agree(steps(ours, GraphRunner(None), count), steps(theirs, TorchRunner(), count))
    return ours, theirs


# ---- what is computed


@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_logits_and_blocks_are_those_of_the_plain_runner(base: BaseModel, size: int):
    versions = [(version(base, None, 0), size)]
    ours, theirs = both(lambda: Scene.of(versions, LENGTHS[:size]))
    agree(ours.held(), theirs.held())


def test_every_row_has_its_own_adapter(base: BaseModel):
    both(lambda: Scene.of(several(base), LENGTHS))


def test_a_sequence_grows_into_new_blocks_and_wider_tables(llama: BaseModel):
    versions = [(version(llama, 4, 1), 2)]
    both(lambda: Scene.of(versions, [126, 120]), count=20)


def test_padding_rows_change_no_block_of_a_sequence(llama: BaseModel):
    scene = Scene.of([(version(llama, 4, 1), 5)], LENGTHS[:5])
    before = [tensor.clone() for tensor in (*scene.pool.keys, *scene.pool.values)]
    batch = scene.next_batch()
    with torch.inference_mode():
        GraphRunner(None).forward(batch, scene.pool)
    spare = scene.pool.num_blocks - scene.pool.num_available - 1
    for layer, (old, new) in enumerate(
        zip(before, (*scene.pool.keys, *scene.pool.values), strict=True)
    ):
        changed = {int(b) for b in (old != new).flatten(1).any(1).nonzero()}
        written = {int(batch.tables[i, p // 16]) for i, p in enumerate(batch.positions)}
        assert changed <= written | {spare}, layer
        assert written <= changed


def test_an_adapter_that_is_not_finite_reaches_no_other_row(llama: BaseModel):
    sick, well = version(llama, 4, 1), version(llama, 4, 2)
    assert sick.adapter is not None
    next(iter(sick.adapter.values()))[1].fill_(float("nan"))
    both_scene = Scene.of([(sick, 1), (well, 1)], [20, 30])
    alone = Scene.of([(sick, 1), (well, 1)], [20, 30])
    ours = steps(both_scene, GraphRunner(None), 2)
    theirs = steps(alone, TorchRunner(), 2)
    for logits, expected in zip(ours, theirs, strict=True):
        assert torch.isnan(logits[0]).all()
        torch.testing.assert_close(logits[1], expected[1], **CLOSE)
        assert torch.isfinite(logits[1]).all()


@pytest.mark.parametrize("runner", [TorchRunner(), GraphRunner(None)])
def test_what_lies_in_blocks_past_the_end_of_a_sequence_is_not_read(
    llama: BaseModel, runner: TorchRunner | GraphRunner
):
    versions = [(version(llama, None, 0), 2)]
    clean, soiled = Scene.of(versions, [20, 50]), Scene.of(versions, [20, 50])
    for tensor in (*soiled.pool.keys, *soiled.pool.values):
        tensor[150] = float("nan")
    for row, used in enumerate((2, 4)):
        soiled.tables[row, used:] = 150
    last = soiled.tables[0, 1]
    for layer in range(3):
        soiled.pool.keys[layer][last, :, :, 5:] = float("nan")
        soiled.pool.values[layer][last, :, 5:] = float("nan")
    agree(steps(soiled, runner, 1), steps(clean, runner, 1))


def test_only_logit_rows_are_returned(llama: BaseModel):
    versions = [(version(llama, None, 0), 4)]
    scene, whole = Scene.of(versions, LENGTHS[:4]), Scene.of(versions, LENGTHS[:4])
    batch = scene.next_batch()
    batch = type(batch)(
        batch.tokens, batch.positions, batch.sequence, batch.tables, versions, np.array([1, 3])
    )
    with torch.inference_mode():
        logits = GraphRunner(None).forward(batch, scene.pool)
    torch.testing.assert_close(logits, steps(whole, GraphRunner(None), 1)[0][[1, 3]])


def test_more_rows_than_any_step_has_take_the_plain_pass(llama: BaseModel):
    size = MAX_ROWS + 3
    assert bucket_for(size) is None
    both(lambda: Scene.of([(version(llama, None, 0), size)], [1] * size, 3 * size + 5), count=1)


def test_buckets_and_widths_are_large_enough():
    assert list(BUCKETS) == sorted(set(BUCKETS))
    for rows in range(1, MAX_ROWS + 1):
        assert rows <= bucket_for(rows) <= 2 * rows
    for blocks in range(1, 641):
        for any_width in (True, False):
            width = width_for(blocks, 633, any_width=any_width)
            assert blocks <= width <= 640
            assert width % 8 == 0


# ---- the bank of adapters


def test_adapters_that_come_and_go_are_each_as_alone(llama: BaseModel):
    runners = GraphRunner(None), TorchRunner()
    for seed in range(1, 9):
        versions = [(version(llama, 3 * seed, seed), 1), (version(llama, 4, seed // 2), 1)]
        for runner in runners:
            scene = Scene.of(versions, [20, 30])
            float64_decoder.assert_near(scene, steps(scene, runner, 2))


def test_more_adapters_than_the_bank_holds_take_the_plain_pass(llama: BaseModel):
    versions = [(version(llama, 2, seed), 1) for seed in range(1, 18)]
    assert GraphRunner(None)._bank(llama).place([v for v, _ in versions]) is None
    both(lambda: Scene.of(versions, [9] * 17), count=2)


def test_a_large_adapter_takes_the_room_of_many_small_ones(llama: BaseModel):
    shapes = llama.config.linear_shapes()
    one_slot = 4 * 32 * sum(sum(shape) for shape in shapes.values())
    bank = AdapterBank(shapes, llama.device, max_bytes=2 * one_slot)
    small = [version(llama, 8, seed) for seed in range(8)]
    assert sorted(bank.place(small) or []) == list(range(8))
    assert bank.nbytes == 2 * one_slot
    assert bank.place([version(llama, 32, 9)]) == [0]
    assert bank.nbytes == one_slot
    assert bank.place([version(llama, 32, seed) for seed in range(3)]) is None
    assert bank.place([version(llama, 65, 1)]) is None
    assert bank.nbytes <= 2 * one_slot


def test_the_least_recently_used_adapter_is_evicted(llama: BaseModel):
    bank = AdapterBank(llama.config.linear_shapes(), llama.device, max_slots=2)
    a, b, c = (version(llama, 4, seed) for seed in (1, 2, 3))
    assert bank.place([a, b]) == [0, 1]
    assert bank.place([a]) == [0]
    assert bank.place([c]) == [1], "b's"
    assert bank.place([a, version(llama, None, 0)]) == [0, NO_ADAPTER]
    assert c.adapter is not None
    for name, (factor, _) in c.adapter.items():
        assert torch.equal(bank.down[name][1, :4], factor)


def test_a_rest_forgets_adapters_and_full_weights_but_not_the_bases_graphs(llama: BaseModel):
    runner = GraphRunner(None)
    weights = {name: tensor * 1.1 for name, tensor in llama.weights.items()}
    full = Version("full", llama, weights, None, 1.0)
    for versions in ([(full, 2)], [(version(llama, 4, 1), 2)]):
        make = lambda v=versions: Scene.of(v, [20, 30])  # noqa: E731
        scene = make()
        agree(steps(scene, runner, 2), steps(make(), TorchRunner(), 2))
    assert set(runner._graphs) == {"full", "base tiny"}
    runner.rest()
    assert set(runner._graphs) == {"base tiny"}
    assert not runner._bank(llama)._slots


# ---- graphs


class Recorded:
    """A capture that repeats the step in the same buffers, and counts."""

    def __init__(self, fails_at: int = -1):
        self.fails_at, self.captured, self.replayed = fails_at, 0, 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.captured == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def test_a_graph_is_captured_once_for_each_kind_of_step(llama: BaseModel):
    capture = Recorded()
    runner = GraphRunner(capture)
    plain, tuned_one = version(llama, None, 0), version(llama, 4, 1)
    for versions in ([(plain, 3)], [(plain, 3)], [(plain, 4)], [(tuned_one, 3)], [(plain, 5)]):
        size = versions[0][1]
        scene = Scene.of(versions, [20] * size)
        pool = next(iter(runner._spare_blocks), scene.pool)
        scene.pool.keys, scene.pool.values = pool.keys, pool.values
        steps(scene, runner, 3)
    kinds = capture.captured
    scenes = Scene.of([(plain, 3)], [20] * 3)
    steps(scenes, runner, 3)
    assert capture.captured == kinds + 1, "another pool, other addresses"
    steps(scenes, runner, 3)
    assert capture.captured == kinds + 1


def test_another_adapter_in_a_slot_needs_no_new_graph(llama: BaseModel):
    capture = Recorded()
    runner, ones = GraphRunner(capture), [version(llama, 8, seed) for seed in (1, 2, 3)]
    scene = Scene.of([(ones[0], 2)], [20, 30])
    plain = Scene.of([(ones[0], 2)], [20, 30])
    for adapted in ones:
        scene.versions = plain.versions = [(adapted, 2)]
        agree(steps(scene, runner, 2), steps(plain, TorchRunner(), 2))
    assert capture.captured == 1
    assert capture.replayed == 6


def test_where_capturing_fails_decoding_goes_on_and_says_so_once(
    llama: BaseModel, caplog: pytest.LogCaptureFixture
):
    capture = Recorded(fails_at=1)
    runner, lengths = GraphRunner(capture), [5, 100, 20]
    scene, plain = (Scene.of([(version(llama, None, 0), 3)], lengths) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        agree(steps(scene, runner, 60), steps(plain, TorchRunner(), 60))
    assert capture.captured == 1
    assert sum("no CUDA graphs" in record.message for record in caplog.records) == 1


def test_the_time_a_capture_takes_is_logged(llama: BaseModel, caplog: pytest.LogCaptureFixture):
    scene = Scene.of([(version(llama, None, 0), 3)], [5, 6, 7])
    with caplog.at_level(logging.INFO):
        steps(scene, GraphRunner(Recorded()), 1)
    assert "captured the decode step of 4 rows" in caplog.text
    assert " ms" in caplog.text


@pytest.mark.parametrize("adapters", [False, True])
def test_a_trace_of_one_step_repeated_on_other_numbers_is_right(base: BaseModel, adapters: bool):
    """What a CUDA graph does: the operations of one step, on whatever then lies in the buffers.
    Nothing may have been read on the host."""
    versions = several(base) if adapters else [(version(base, None, 0), 11)]
    scene, plain = (Scene.of(versions, LENGTHS) for _ in range(2))
    runner = GraphRunner(Traced())
    agree(steps(scene, runner, 5), steps(plain, TorchRunner(), 5))
    agree(scene.held(), plain.held())


# ---- in the engine


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_states, "runner_for", lambda base, threads: GraphRunner(Recorded()))


def test_the_engine_samples_the_same_tokens_through_it(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
):
    versions = [store.publish(FromBase("tiny")), tuned(store, "a", 4), tuned(store, "b", 6, seed=2)]
    requests = {
        str(i): (versions[i % 3], ask(random_prompt(10 + 7 * i, i), n=2, max_tokens=25, seed=i))
        for i in range(9)
    }
    expected = Sampler(store).run(requests)
    make = lambda base, threads: GraphRunner(Recorded())  # noqa: E731
    monkeypatch.setattr(base_states, "runner_for", make)
    for name, output in Sampler(store).run(requests).items():
        for ours, theirs in zip(output.sequences, expected[name].sequences, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-4)


def test_the_engine_gives_memory_of_keys_and_values_back_after_a_failure(
    store: ModelStore, graphs: None
):
    sampler = Sampler(store)
    base = store.publish(FromBase("tiny"))
    sampler.one(base, ask(random_prompt(20, 0), max_tokens=3))
    (runner,) = [state.runner for state in sampler.engine.states]
    assert isinstance(runner, GraphRunner)
    assert len(runner._spare_blocks) == 1
    sampler.engine.fail_all(RuntimeError("broken"))
    del sampler
    assert len(runner._spare_blocks) == 0


def test_the_plain_runner_makes_its_indices_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    num_arrays: dict[int, int] = {}
    for num_layers in (1, 3):
        base = random_base(tiny_config("Llama", num_hidden_layers=num_layers))
        scene = Scene.of([(version(base, None, 0), len(LENGTHS))], LENGTHS)
        batch, calls = scene.next_batch(), []
        from_numpy = torch.from_numpy
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "from_numpy", lambda a: calls.append(1) or from_numpy(a))  # noqa: B023
            TorchRunner().forward(batch, scene.pool)
        num_arrays[num_layers] = len(calls)
    assert num_arrays[1] == num_arrays[3] > 0
