"""Online training of drafts: what it captures, when it trains, what it changes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.embedded.draft_training.toy_policy import ToyPolicy, filled
from tests.embedded.drafting.test_speculative_rl import datum
from tests.embedded.process.worker_driver import Driver
from tests.embedded.speculative_engine import untaught_head
from tests.embedded.tiny import ask, open_store, random_prompt, same
from tests.waiting import wait_for
from tinkercloud.config import DraftConfig
from tinkercloud.core.types import (
    AdamParams,
    Datum,
    FromBase,
    FromModel,
    LoraSpec,
    SampleOutput,
    TrainBatch,
)
from tinkercloud.embedded.draft_training.capture import (
    CapturedSequence,
    CaptureSettings,
    PassCapture,
    SequenceMetadata,
    capture_sequence,
)
from tinkercloud.embedded.draft_training.files import drafts_of
from tinkercloud.embedded.draft_training.head_trainer import HeadObjective, HeadTrainer
from tinkercloud.embedded.draft_training.online_trainer import (
    ONLINE_PLAN,
    QUIET_S,
    DraftTrainee,
    OnlineTrainer,
)
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.protocol import (
    CreateModel,
    ForwardBackward,
    OptimStep,
    Publish,
    Sample,
    SaveModel,
    TrainDraft,
)
from tinkercloud.embedded.training.layout import Layout
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.observer import Datums
from tinkercloud.embedded.training.queue import ObserverFactory, TrainingQueue
from tinkercloud.speculative.learning.cases import CaseStore
from tinkercloud.speculative.learning.schedule import TimeBudget
from tinkercloud.speculative.observability.acceptance_log import Line, read_moments

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
STEPS = 12
LONGEST_S = 5.0  # of one piece of training, which is not cut
ASK_EVERY_S = 0.05
LAYERS = (1, 2)


def group(prompt_seed: int, advantages: Sequence[float]) -> list[Datum]:
    """Samples of one prompt, long enough to be shared by a pass."""
    prompt = np.array(random_prompt(24, prompt_seed), np.int32)
    return [
        datum(
            prompt,
            np.array(random_prompt(12 + i, 100 * prompt_seed + i), np.int32),
            np.full(12 + i, -1.0, np.float32),
            advantage,
        )
        for i, advantage in enumerate(advantages)
    ]


def trained(
    store: ModelStore, model: str, data: list[Datum], watch: ObserverFactory | None
) -> dict[str, torch.Tensor]:
    """The gradient of one call."""
    queue = TrainingQueue(Limits(1024), watch)
    queue.add(0, store.model(model), TrainBatch(tuple(data), "importance_sampling"))
    (done,) = queue.step(60.0)
    assert done.error is None
    return store.model(model).grads


@pytest.fixture
def store(folder: Path) -> ModelStore:
    store = open_store(folder)
    store.create_model("m", "tiny", LoraSpec(rank=4, seed=0))
    generator = torch.Generator().manual_seed(0)
    adapter = store.model("m").adapter
    assert adapter is not None
    with torch.no_grad():
        for _, b in adapter.values():
            b.normal_(0, 0.05, generator=generator)
    return store


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sequences_captured_in_a_training_pass_are_those_of_a_pass_of_their_own(
    store: ModelStore, temperature: float
) -> None:
    seen: list[CapturedSequence] = []
    budget = TimeBudget()

    def watch(base: BaseModel, model_ids: Sequence[str]) -> PassCapture:
        assert model_ids == ["m"]
        metadata = [SequenceMetadata(temperature, 3, 16, "m")]
        return PassCapture(CaptureSettings(LAYERS, 10_000, 0, metadata), seen.append, budget)

    data = group(1, [0.5, -0.5, 0.0]) + group(2, [1.0, -1.0])
    trained(store, "m", data, watch)
    assert len(seen) == len(data)
    assert budget.spent_s > 0
    version = store.version(store.publish(FromModel("m")))
    for one in seen:
        metadata = SequenceMetadata(temperature, 3, 16, "m")
        alone = capture_sequence(version, one.tokens, LAYERS, 24, metadata)
        np.testing.assert_allclose(one.hidden, alone.hidden, atol=1e-4)
        np.testing.assert_allclose(one.top_probs, alone.top_probs, atol=1e-5)
        assert (one.top_ids == alone.top_ids).mean() > 0.99
        np.testing.assert_array_equal(one.weights, alone.weights)
        assert (one.temperature, one.epoch, one.category) == (temperature, 3, "m")


def test_captured_rows_are_bounded_and_rotation_takes_other_datums(store: ModelStore) -> None:
    data = group(1, [1.0, -1.0]) + group(2, [1.0, -1.0]) + group(3, [1.0, -1.0])
    lengths: list[list[int]] = []
    for rotation in range(3):
        seen: list[CapturedSequence] = []
        settings = CaptureSettings(LAYERS, 80, rotation, [SequenceMetadata(1.0, 0)])
        trained(
            store,
            "m",
            data,
            lambda *_, add=seen.append, settings=settings: PassCapture(settings, add, TimeBudget()),
        )
        assert sum(len(one.tokens) for one in seen) <= 80
        lengths.append([one.tokens[30] for one in seen])
    assert lengths[0] != lengths[1] != lengths[2]


class Broken:
    def begin(self, shares: Sequence[Datums], layout: Layout) -> None:
        raise ValueError("no")

    def block(self, number: int, x: torch.Tensor) -> None:
        raise AssertionError("nothing more is shown")

    distributions = end = block


def test_an_observer_changes_no_bit_of_a_gradient_even_where_it_fails(store: ModelStore) -> None:
    data = group(1, [0.5, -0.5]) + group(2, [1.0, -1.0])
    model = store.model("m")
    gradients = []
    settings = CaptureSettings(LAYERS, 1000, 0, [SequenceMetadata(1.0, 0)])
    for watch in (
        None,
        lambda *_: PassCapture(settings, lambda sequence: None, TimeBudget()),
        lambda *_: Broken(),
    ):
        gradients.append(dict(trained(store, "m", data, watch)))
        model.grads = {}
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name])
        assert torch.equal(grad, gradients[2][name])


# ---- in the worker


def publish_untrained(folder: Path, drafts: Path) -> None:
    """A head without any training becomes the best."""
    trainer = HeadTrainer(*untaught_head(open_store(folder).base("tiny")), HeadObjective())
    target = drafts_of(drafts, "tiny")
    params = {name: p.detach() for name, p in trainer.params.items()}
    name = target.publish(lambda path: trainer.write(params, path), {"reason": "untrained"})
    target.use("best", name)


class Run:
    """RL through a worker, as the server calls it."""

    def __init__(self, driver: Driver):
        self._driver = driver
        driver.call(CreateModel("m", "tiny", LoraSpec(rank=4, seed=0)))
        self.samples: list[SampleOutput] = []

    def step(self, number: int) -> None:
        driver = self._driver
        version = driver.call(Publish(FromModel("m")))
        requests = [
            ask(random_prompt(18, i), n=4, max_tokens=32, seed=10 * number + i, use_eos=False)
            for i in range(2)
        ]
        data = []
        for call, request in [(driver.send(Sample(version, r)), r) for r in requests]:
            output = driver.wait(call)
            assert isinstance(output, SampleOutput)
            self.samples.append(output)
            rewards = np.array([(one.tokens < 64).mean() for one in output.sequences])
            data += [
                datum(request.prompt, one.tokens, one.logprobs, advantage)
                for one, advantage in zip(output.sequences, rewards - rewards.mean(), strict=True)
            ]
        batch = TrainBatch(tuple(data), "importance_sampling")
        driver.call(ForwardBackward("m", batch))
        driver.call(OptimStep("m", AdamParams(learning_rate=0.01)))

    def saved(self, folder: Path) -> dict[str, bytes]:
        self._driver.call(SaveModel("m", folder, False))
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}


@pytest.fixture(scope="module")
def runs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, Run, Driver, Path]]:
    """Without drafts, and with a head that learns; the latter's worker and its drafts."""
    scratch = tmp_path_factory.mktemp("following")
    publish_untrained(folder, scratch)
    plain = Driver(folder, tmp_path_factory.mktemp("plain"))
    drafted = Driver(folder, scratch, "head")  # with the defaults: quiet time is for drafts
    both = Run(plain), Run(drafted)
    for number in range(STEPS):
        for run in both:
            run.step(number)
    yield *both, drafted, scratch
    plain.end()
    drafted.end()


def test_samples_and_weights_are_those_without_a_draft_that_learns(
    runs: tuple[Run, Run, Driver, Path], tmp_path: Path
) -> None:
    plain, drafted, _, _ = runs
    for one, other in zip(plain.samples, drafted.samples, strict=True):
        same(one, other)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert plain.saved(tmp_path / "a") == drafted.saved(tmp_path / "b")


def following(driver: Driver) -> dict[str, Any]:
    """Figures of draft training, which come with the answer to a request."""
    driver.call(Publish(FromBase("tiny")))
    return driver.stats.speculation["tiny"]["following"]


def test_training_keeps_within_its_share_and_is_reported(
    runs: tuple[Run, Run, Driver, Path],
) -> None:
    _, _, driver, scratch = runs
    snapshot = wait_for(
        "the draft has been trained after the last step",
        lambda: following(driver),
        lambda seen: seen["last_training"] and seen["policy_steps"] == STEPS,
        poll_s=ASK_EVERY_S,
    )
    assert not snapshot["is_over"]
    seconds = snapshot["seconds"]
    assert seconds["capture"] > 0
    assert seconds["capture"] + seconds["training"] < snapshot["allowed_s"] + LONGEST_S
    assert seconds["training in quiet time"] > 0
    last = snapshot["last_training"]
    assert last["num_steps"] == ONLINE_PLAN.num_steps
    assert not last["promoted"] or last["after"]["mean"] > last["before"]["mean"]
    assert sum(snapshot["trainings"].values()) >= 1
    folder = drafts_of(scratch, "tiny")
    assert folder.resolve("latest") != "draft-000001"
    assert snapshot["draft"] == folder.resolve("best")


class Debtor:
    """Captures that take longer than a thousand steps allow."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e3
        return self.now


def test_capture_in_debt_cannot_starve_training(
    trained_head: tuple[ToyPolicy, HeadTrainer], tmp_path: Path
) -> None:
    policy, trainer = trained_head
    dataset = filled(policy)
    trainee = DraftTrainee(trainer, dataset, lambda params: None, (4,), dataset.add)
    loop = OnlineTrainer(drafts_of(tmp_path, "m"), CaseStore(1 << 20, 4), trainee)
    capture = loop.observer(["m"])
    assert capture is not None
    loop._capture_budget._clock = Debtor()
    loop.stepped(1.0)
    with loop._capture_budget.spending():
        pass
    assert loop.observer(["m"]) is None  # owed
    for _ in range(20):  # a tenth of each, less the part that is capture's
        loop.stepped(10.0)
        while loop.is_due and not loop.snapshot()["last_training"]:
            loop.work()
    assert loop.snapshot()["last_training"]["num_steps"] == ONLINE_PLAN.num_steps


# ---- a server that only samples


@dataclass
class Sampled:
    """A server that nobody trains on. before: the draft that it begins with."""

    driver: Driver
    drafts: Path
    before: str = "draft-000001"

    def sample(self, first: int) -> None:
        calls = [
            self.driver.send(
                Sample(
                    self.driver.call(Publish(FromBase("tiny"))),
                    ask(random_prompt(8, i), n=2, max_tokens=24, seed=i, use_eos=False),
                )
            )
            for i in range(first, first + 12)
        ]
        for call in calls:
            self.driver.wait(call)

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        return wait_for(what, lambda: following(self.driver), holds, poll_s=ASK_EVERY_S)

    def outcome(self) -> dict[str, Any]:
        """Once a training has ended."""
        return self.wait_for("a training has ended", lambda seen: sum(seen["trainings"].values()))


@contextmanager
def only_samples(
    folder: Path, drafts: Path, rate: float, least_cases: int = 400
) -> Iterator[Sampled]:
    publish_untrained(folder, drafts)
    draft = DraftConfig(least_cases=least_cases, rate=rate)
    driver = Driver(folder, drafts, "head", draft=draft)
    try:
        yield Sampled(driver, drafts)
    finally:
        driver.end()


def test_where_nobody_trains_a_head_learns_from_samples_in_quiet_time(
    folder: Path, tmp_path: Path
) -> None:
    with only_samples(folder, tmp_path, rate=3e-3) as sampled:
        sampled.sample(0)
        found = sampled.outcome()
        best = drafts_of(tmp_path, "tiny").resolve("best")
    assert not found["is_over"]
    assert found["trainings"] == {"used": 1, "refused": 0, "failed": 0}
    assert found["policy_steps"] == 0
    assert found["draft"] == best != sampled.before
    assert found["last_training"]["reason"].endswith("new cases")
    assert found["last_training"]["after"]["mean"] > found["last_training"]["before"]["mean"]
    seconds = found["seconds"]
    assert min(seconds["capture in quiet time"], seconds["training in quiet time"]) > 0
    assert (seconds["capture"], seconds["training"]) == (0, 0)


def test_a_head_that_training_has_made_worse_is_refused_and_waits_for_more_cases(
    folder: Path, tmp_path: Path
) -> None:
    """Steps of this size leave nothing of what a head knew."""
    with only_samples(folder, tmp_path, rate=30.0) as sampled:
        sampled.sample(0)
        found = sampled.outcome()
        sampled.sample(100)  # as many again are not enough now
        time.sleep(2 * QUIET_S)
        later = following(sampled.driver)
        names = [drafts_of(tmp_path, "tiny").resolve(name) for name in ("best", "latest")]
    assert found["trainings"] == {"used": 0, "refused": 1, "failed": 0}
    assert found["last_training"]["after"]["mean"] < found["last_training"]["before"]["mean"]
    assert later["trainings"] == found["trainings"]
    assert later["draft"] == names[0] == sampled.before != names[1]


def test_a_training_that_breaks_off_is_counted_and_the_draft_stays(
    folder: Path, tmp_path: Path
) -> None:
    """Weights of this size overflow in the second step at the latest."""
    with only_samples(folder, tmp_path, rate=1e30) as sampled:
        sampled.sample(0)
        found = sampled.wait_for("one has failed", lambda seen: seen["trainings"]["failed"])
    assert (found["trainings"]["used"], found["trainings"]["refused"]) == (0, 0)
    assert found["draft"] == sampled.before and found["last_training"] is None


def test_a_head_learns_when_somebody_asks_though_it_is_not_due(
    folder: Path, tmp_path: Path
) -> None:
    with only_samples(folder, tmp_path, rate=3e-3, least_cases=10**9) as sampled:
        early = sampled.driver.result(sampled.driver.send(TrainDraft("tiny")))
        sampled.sample(0)
        sampled.driver.call(TrainDraft("tiny"))
        is_asked = sampled.driver.stats.speculation["tiny"]["following"]["is_asked"]
        found = sampled.outcome()
    assert early.error is not None
    assert early.error[1].endswith("or nothing was sampled yet")
    assert is_asked
    assert found["last_training"]["reason"] == "asked for"
    assert not found["is_asked"]


def test_who_asks_is_not_kept_waiting_where_the_samples_are_too_few(
    folder: Path, tmp_path: Path
) -> None:
    """One text is either learned from or held out, and both are needed."""
    with only_samples(folder, tmp_path, rate=3e-3, least_cases=10**9) as sampled:
        version = sampled.driver.call(Publish(FromBase("tiny")))
        request = ask(random_prompt(8, 0), max_tokens=24, seed=0, use_eos=False)
        sampled.driver.call(Sample(version, request))
        sampled.driver.call(TrainDraft("tiny"))
        found = sampled.wait_for("it is answered", lambda seen: not seen["is_asked"])
    assert found["trainings"] == {"used": 0, "refused": 0, "failed": 0}


def lines_of(folder: Path) -> list[Line]:
    return [line for moment in read_moments(folder) for line in moment]


def test_acceptance_is_logged(runs: tuple[Run, Run, Driver, Path]) -> None:
    _, _, _, scratch = runs
    lines = lines_of(drafts_of(scratch, "tiny").root)
    assert lines
    assert {line.category for line in lines} == {"m"}
    assert sum(line.proposed for line in lines) >= sum(line.accepted for line in lines) >= 0
    assert all(line.draft.startswith("draft-") for line in lines)


def test_where_the_policy_makes_no_step_a_line_is_written_each_minute(tmp_path: Path) -> None:
    folder = drafts_of(tmp_path, "m")
    loop = OnlineTrainer(folder, CaseStore(1 << 20, 4))
    for now_s in (1000.0, 1030.0, 1061.0):
        loop.drafted("m", 10, 4)
        loop.poll(now_s, idle=False)
    lines = lines_of(folder.root)
    assert [(line.proposed, line.accepted) for line in lines] == [(10, 4), (20, 8)]
