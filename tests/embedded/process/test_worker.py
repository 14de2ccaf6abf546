"""Sampling for one model and training for another share the device: neither starves."""

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.process.worker_driver import Driver
from tests.embedded.tiny import ask, random_prompt, supervised
from tinkercloud.core.types import AdamParams, FromBase, FromModel, LoraSpec, TrainBatch
from tinkercloud.embedded.model import freed_memory
from tinkercloud.embedded.process import worker
from tinkercloud.embedded.process.memory_budget import MemoryBudget
from tinkercloud.embedded.process.protocol import (
    CopyState,
    CreateModel,
    ForwardBackward,
    OptimStep,
    Publish,
    Request,
    Sample,
    SaveModel,
    WriteState,
)
from tinkercloud.embedded.sampling.step_length import StepLength
from tinkercloud.embedded.training.state_files import StateCopy
from tinkercloud.embedded.training.trainable_model import TrainableModel


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(folder, tmp_path)
    yield driver
    driver.end()


def batch(length: int, user: str = "") -> TrainBatch:
    return TrainBatch((supervised(length, 0),) * 8, "cross_entropy", user=user)


def test_neither_samples_nor_training_waits_for_an_endless_stream_of_the_other(
    driver: Driver,
) -> None:
    version = driver.call(Publish(FromBase("tiny")))
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    sample = Sample(version, ask(random_prompt(20, 1), max_tokens=8, use_eos=False))
    train = ForwardBackward("m", batch(100))
    samples, calls = list[int](), list[int]()

    def another(number: int) -> None:
        if number in samples:
            samples.append(driver.send(sample))
        elif number in calls:
            calls.append(driver.send(train))

    driver.whenever = another
    samples.extend(driver.send(sample) for _ in range(8))
    calls.extend(driver.send(train) for _ in range(2))
    # By turns: one who was away for long may have its credit first, but not for ever.
    for _ in range(3):
        driver.wait(calls[-1])
        driver.wait(samples[-1])


def test_a_long_sample_is_answered_under_an_endless_stream_of_training(driver: Driver) -> None:
    version = driver.call(Publish(FromBase("tiny")))
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    calls = {driver.send(ForwardBackward("m", batch(100))) for _ in range(2)}

    def another(number: int) -> None:
        if number in calls:
            calls.add(driver.send(ForwardBackward("m", batch(100))))

    driver.whenever = another
    request = ask(random_prompt(20, 1), max_tokens=900, use_eos=False)
    output = driver.call(Sample(version, request))
    assert len(output.sequences[0].tokens) == 900
    assert calls & set(driver.order), "training went on too"


def test_company_changes_no_result(driver: Driver) -> None:
    version = driver.call(Publish(FromBase("tiny")))
    for name in ("alone", "together"):
        driver.call(CreateModel(name, "tiny", LoraSpec(rank=4, seed=0)))
    request = ask(random_prompt(20, 1), max_tokens=64, use_eos=False)
    sampled = driver.call(Sample(version, request))
    trained = driver.call(ForwardBackward("alone", batch(200)))
    both = (
        driver.send(ForwardBackward("together", batch(200))),
        driver.send(Sample(version, request)),
    )
    trained_together, sampled_together = map(driver.wait, both)
    ours, theirs = sampled.sequences[0], sampled_together.sequences[0]
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    for ours, theirs in zip(trained.outputs, trained_together.outputs, strict=True):
        np.testing.assert_array_equal(ours["logprobs"], theirs["logprobs"])


def test_what_training_has_freed_is_given_back_once_in_quiet_time(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back, quiet = list[float](), threading.Event()

    def give_back() -> None:
        given_back.append(time.monotonic())
        quiet.set()

    version = driver.call(Publish(FromBase("tiny")))
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    monkeypatch.setattr(freed_memory, "give_back", give_back)
    for _ in range(3):
        driver.call(ForwardBackward("m", batch(20)))
    trained = time.monotonic()
    assert not given_back
    assert quiet.wait(20)
    assert given_back[0] - trained > worker.QUIET_S - 0.1
    driver.call(Sample(version, ask(random_prompt(20, 1), max_tokens=8, use_eos=False)))
    time.sleep(2 * worker.QUIET_S)
    assert len(given_back) == 1


def test_steps_of_sampling_are_short_after_training_of_somebody_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = driver.call(Publish(FromBase("tiny")))
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    short: list[bool] = []
    begin = StepLength.begin

    def seen(length: StepLength, *, is_short: bool) -> None:
        short.append(is_short)
        begin(length, is_short=is_short)

    monkeypatch.setattr(StepLength, "begin", seen)

    def steps_for(user: str) -> set[bool]:
        short.clear()
        driver.call(Sample(version, ask(random_prompt(20, 1), use_eos=False, user=user)))
        return set(short)

    assert steps_for("ada") == {False}
    driver.call(ForwardBackward("m", batch(8, "bob")))
    assert steps_for("ada") == {True}
    assert steps_for("bob") == {False}, "nobody else waits for these"


def test_a_copy_is_free_before_anybody_knows_that_it_is_written(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who then deletes the model can have all of its memory."""
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    copied: list[weakref.ref[torch.Tensor]] = []
    copy_of = StateCopy.of

    def seen(model: TrainableModel) -> StateCopy:
        copy = copy_of(model)
        copied.extend(weakref.ref(each) for each in (copy.contents.moments or {}).values())
        return copy

    monkeypatch.setattr(StateCopy, "of", seen)
    copy = driver.call(CopyState("m"))
    assert all(each() is not None for each in copied)
    assert copied
    still_held: list[int] = []
    driver.whenever = lambda _: still_held.append(sum(each() is not None for each in copied))
    (tmp_path / "written").mkdir()
    driver.call(WriteState(copy, tmp_path / "written"))
    assert still_held == [0]


def test_a_pass_ends_what_shares_its_models_tensors(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    monkeypatch.setattr(MemoryBudget, "has_room", lambda *_: False)
    copy = driver.call(CopyState("m"))
    driver.call(ForwardBackward("m", batch(8)))
    (tmp_path / "written").mkdir()
    refused = driver.result(driver.send(WriteState(copy, tmp_path / "written")))
    assert refused.error is not None
    assert refused.error[0] == "StateCopyLost"


LONG_WORK: dict[str, Request[object]] = {
    "create": CreateModel("new", "tiny", LoraSpec(rank=4, seed=0)),
    "optim_step": OptimStep("m", AdamParams(1e-3)),
    "copy": CopyState("m"),
    "publish": Publish(FromModel("m")),
}


@pytest.mark.parametrize("name", LONG_WORK)
def test_samples_go_on_during_long_work_on_a_model_and_other_requests_keep_their_order(
    name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SLICE_S", 0.0)  # each part of the work is long
    version = driver.call(Publish(FromBase("tiny")))
    driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
    request = ask(random_prompt(20, 1), max_tokens=4, use_eos=False)
    alone = driver.call(Sample(version, request)).sequences[0]
    later = (Sample(version, request), ForwardBackward("m", batch(8)), Publish(FromModel("m")))
    work, sample, _, publish = driver.send_at_once(LONG_WORK[name], *later)
    order = [number for number in driver.order if number in (work, sample, publish)]
    assert order == [sample, work, publish]
    sampled = driver.wait(sample).sequences[0]
    np.testing.assert_array_equal(sampled.tokens, alone.tokens)
    np.testing.assert_array_equal(sampled.logprobs, alone.logprobs)


@pytest.mark.parametrize("name", LONG_WORK)
def test_passes_and_saves_of_other_models_go_on_during_long_work_on_one_and_none_of_its_own(
    name: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SLICE_S", 0.0)  # each part of the work is long
    for model in ("m", "other", "alone"):
        driver.call(CreateModel(model, "tiny", LoraSpec(rank=4, seed=0)))
    alone = driver.call(ForwardBackward("alone", batch(8)))
    passes = (ForwardBackward("m", batch(8)), ForwardBackward("other", batch(8)))
    later = (*passes, SaveModel("alone", tmp_path, True))
    work, own, other, save = driver.send_at_once(LONG_WORK[name], *later)
    assert driver.order.index(save) < driver.order.index(work)
    order = [number for number in driver.order if number in (work, own, other)]
    assert order == ([other, work, own] if name != "create" else [own, other, work])
    for ours, theirs in zip(driver.wait(other).outputs, alone.outputs, strict=True):
        np.testing.assert_array_equal(ours["logprobs"], theirs["logprobs"])
