"""When a draft trains beside the policy: not where whoever asks next would wait for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.draft_training.test_online_trainer import Run, publish_untrained
from tests.embedded.process.worker_driver import Driver
from tinkercloud.config import DraftConfig
from tinkercloud.embedded.forward import runners

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
SHARE = 50.0  # of the time of steps, which are short here: a training is always due
IDLE_S = 0.3


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    publish_untrained(folder, tmp_path)
    driver = Driver(folder, tmp_path, "head", SHARE, DraftConfig(in_quiet_time=False))
    yield driver
    driver.end()


def test_a_draft_trains_between_slices_of_the_policys_training_and_not_while_all_is_idle(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, whiles = driver._worker, list[bool]()
    work = worker._drafts.work

    def watched(*, quiet: bool = False) -> None:
        whiles.append(worker._is_idle)
        work(quiet=quiet)

    monkeypatch.setattr(worker._drafts, "work", watched)
    run = Run(driver)
    for number in range(3):
        run.step(number)
        time.sleep(IDLE_S)
    assert whiles and not any(whiles)
