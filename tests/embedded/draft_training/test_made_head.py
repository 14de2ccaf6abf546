"""`auto` with `--draft-make-head`: a head is made out of samples in quiet time, and drafts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.embedded.tiny import Sampler, ask, open_store, random_prompt, same
from tinkercloud.config import ModelSource
from tinkercloud.core.types import FromBase, SampleOutput, SampleRequest
from tinkercloud.embedded.draft_training.driver import TrainingSettings
from tinkercloud.embedded.draft_training.files import drafts_of, has_trained
from tinkercloud.embedded.draft_training.online_trainer import ONLINE_PLAN, OnlineSettings
from tinkercloud.embedded.draft_training.online_trainers import OnlineTrainers
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.drafter_setup import (
    NEW_CASES,
    DrafterSettings,
    require_drafts,
    speculate,
)
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.learning.schedule import TriggerSettings

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
LEAST_CASES, MOST_WORK = 16, 1000


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Times of rounds are measured and kept there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield


def settings_of(folder: Path) -> DrafterSettings:
    training = TrainingSettings(
        replace(ONLINE_PLAN, peak_rate=1e-3), TriggerSettings(least_cases=LEAST_CASES, goal=1.0)
    )
    online = OnlineSettings(training=training)
    return DrafterSettings("auto", None, 1, folder, folder / "drafts", online, make_head=True)


def requests(epoch: int) -> list[SampleRequest]:
    """Other prompts in each, of which no earlier text says anything."""
    return [
        ask(random_prompt(6, 10 * epoch + i), n=4, max_tokens=40, seed=epoch, use_eos=False)
        for i in range(6)
    ]


def sampled(sampler: Sampler, version: str, epoch: int) -> list[SampleOutput]:
    return [sampler.one(version, request) for request in requests(epoch)]


def test_a_head_is_made_out_of_samples_and_drafts_from_its_promotion_on(
    folder: Path, tmp_path: Path
) -> None:
    store = open_store(folder)
    version = store.publish(FromBase("tiny"))
    without = Sampler(store, num_threads=1)
    trainers, settings = OnlineTrainers(), settings_of(tmp_path)
    sampler = Sampler(store, num_threads=1, speculate=speculate(settings, trainers))
    drafts, epochs = drafts_of(settings.drafts_dir, "tiny"), count()

    def sample_more() -> set[str]:
        """The drafters that have been asked by now."""
        epoch = next(epochs)
        plain = sampled(without, version, epoch)
        for output, expected in zip(sampled(sampler, version, epoch), plain, strict=True):
            same(output, expected)
        assert sum(len(s.tokens) for o in plain for s in o.sequences) > NEW_CASES * LEAST_CASES
        return set(sampler.engine.speculation()[0]["tiny"]["drafters"])

    assert sample_more() == {"suffix"} and not has_trained(drafts)
    for _ in range(MOST_WORK):
        if trainers.snapshot()["tiny"]["trainings"]["used"]:
            break
        if not trainers.are_due_in_quiet:
            sample_more()
        trainers.work(quiet=True)
    assert has_trained(drafts)
    assert sample_more() == {"suffix", "head"}
    assert not trainers.snapshot()["tiny"]["is_over"]


def test_a_head_that_has_learned_nothing_is_none_to_start_with(
    folder: Path, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path)
    store = open_store(folder)
    sampler = Sampler(store, num_threads=1, speculate=speculate(settings, OnlineTrainers()))
    sampler.one(store.publish(FromBase("tiny")), requests(0)[0])
    assert drafts_of(settings.drafts_dir, "tiny").find("best") is not None
    with pytest.raises(ConfigError, match="has no draft head"):
        require_drafts(replace(settings, name="head"), [ModelSource("tiny", folder)])
