"""Training runs over a dozen kills: the server's or its engine's process ends while the run is
underway, and what a client sees is, bit for bit, what it would have seen."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import tinker

import tinker_gmi
from tests.e2e.killer import Kill
from tests.e2e.kills import disturbed, served, undisturbed
from tests.e2e.training_loops import LoopName, TrainingLoop
from tests.serving import Server
from tinkercloud.embedded.native.compiler import library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C compiler here"),
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="the engine is found in /proc"),
]

# A checkpoint's moment is short: one that was missed comes again with the next, three steps later.
NUM_STEPS: Mapping[LoopName, int] = {"rl": 3, "sft": 6}
# Every other one comes while what the one before has ended is still starting: that is cheap.
SFT = (
    Kill(0, "acknowledged", "server"),
    Kill(0, "start", "server", delay_s=1.2),
    Kill(1, "sampling", "engine"),
    Kill(1, "start", "engine", delay_s=0.5),
    Kill(2, "checkpoint", "server"),
    Kill(2, "start", "server", delay_s=0.4),
)
RL = (
    Kill(1, "pass", "engine", delay_s=0.05),
    Kill(1, "start", "engine", delay_s=0.5),
    Kill(2, "sampling", "server", signal.SIGTERM),
    Kill(2, "start", "server", delay_s=1.2),
    Kill(2, "replay", "server"),
    Kill(2, "start", "server", delay_s=0.4),
)


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(smollm2_gguf, tmp_path_factory.mktemp("server") / "data") as server:
        yield server


@pytest.mark.parametrize(
    ("sdk", "name", "kills"),
    [
        pytest.param(tinker, "rl", RL, id="tinker"),
        pytest.param(tinker_gmi, "sft", SFT, id="tinker_gmi", marks=pytest.mark.slow),
    ],
)
def test_a_run_over_kills_is_the_run_without_them(
    sdk: ModuleType, name: LoopName, kills: Sequence[Kill], server: Server
) -> None:
    loop = TrainingLoop(name, NUM_STEPS[name])
    result = disturbed(sdk, server, loop, kills, undisturbed(server, loop))
    assert result.missing == 0
    assert result.differences == []
