"""A planted shift through a server with default settings and the official client: the head falls
behind the policy's new style, and follows by itself."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.embedded.draft_training.test_planted_shift import style
from tests.embedded.tiny import open_store, random_prompt
from tests.serving import Server, start_server
from tinkercloud.commands.drafts.collect import sample_texts
from tinkercloud.commands.drafts.target import Target
from tinkercloud.commands.drafts.train import DistillConfig, distilled
from tinkercloud.commands.generation.api_client import ApiClient
from tinkercloud.commands.generation.draft_trainer import DraftTrainer
from tinkercloud.embedded.draft_training.files import drafts_of
from tinkercloud.embedded.draft_training.fit import Plan
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.model.version import Version

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
STEPS, LONGEST_S = 14, 300.0
WARM_UP_STEPS, WARM_UP_ROUNDS = 3, 4  # after these the first draft has been met
REST_S = 3.0  # quiet time, in which a draft is trained whole; beside steps it has a small share
PLAN = Plan(num_steps=40, warmup_steps=5, peak_rate=3e-3)


def make_head(folder: Path, data_dir: Path) -> None:
    """Of the base model."""
    base = open_store(folder).base("tiny")
    version = Version("v", base, base.weights, None, 1.0)
    target = Target(version, [random_prompt(6, i) for i in range(12)], 1)
    config = DistillConfig(samples=6, tokens=40, vocabulary=260, plan=PLAN)
    drafts = drafts_of(data_dir / "drafts", "tiny")
    texts = sample_texts(target, config)
    distilled(version, texts, config, drafts, lambda line: None)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "data"


@pytest.fixture(scope="module")
def server(folder: Path, data_dir: Path) -> Iterator[Server]:
    make_head(folder, data_dir)
    flags = ("--backend", "embedded", "--model", f"tiny={folder}", "--speculate", "head")
    flags += ("--engine-threads", "1")  # tests share the cores
    with start_server(*flags, data_dir=data_dir) as server:
        yield server


class Run:
    """SFT to the style, with samples of every version."""

    def __init__(self, server: Server):
        self._server = server
        service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        self._model = service.create_lora_training_client("tiny", rank=16, seed=0).result()

    def step(self, number: int) -> None:
        data = [datum(16 * number + i) for i in range(16)]
        training = self._model.forward_backward(data, "cross_entropy")
        self._model.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        training.result()
        sampler = self._model.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=32, temperature=1.0, seed=number)
        prompt = tinker.ModelInput.from_ints(style(9000 + number, 3))
        sampler.sample(prompt=prompt, num_samples=4, sampling_params=params).result()

    def following(self) -> dict[str, Any]:
        return self._speculation()["following"]

    def counts(self) -> dict[str, int]:
        """Rounds in which drafts were met, drafted tokens accepted, trained drafts in use."""
        counters = self._speculation()
        depths = counters["drafters"]["head"]["depths"]
        return {
            "first": counters["rounds"]["first"],
            "accepted": sum(depth["accepted"] for depth in depths),
            "used": counters["following"]["trainings"]["used"],
        }

    def _speculation(self) -> dict[str, Any]:
        return self._server.http().get("/health").json()["speculation"]["tiny"]


def datum(seed: int) -> tinker.Datum:
    tokens = style(seed)
    inputs = {
        "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
        "weights": tinker.TensorData.from_numpy(np.full(len(tokens) - 1, 1 / 16, np.float32)),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    """With steps until a draft that learned from them is drafted with. Whether it pays is for the
    machine to say; that it is met as a new one is, so that times and acceptance of the one before
    keep nothing from being drafted, is not."""
    run = Run(server)
    deadline, number = time.monotonic() + LONGEST_S, 0
    before = now = {"first": WARM_UP_ROUNDS, "accepted": 0, "used": 0}
    while number < STEPS or not (
        now["used"] and now["first"] > before["first"] and now["accepted"] > before["accepted"]
    ):
        assert time.monotonic() < deadline, f"{before} {now} {run.following()}"
        if number >= STEPS and not now["used"]:
            time.sleep(REST_S)
        run.step(number)
        number += 1
        now = run.counts()
        if number > WARM_UP_STEPS and not now["used"]:
            before = now
    return run


def test_a_head_follows_a_new_style_and_is_drafted_with_again_by_default_settings(run: Run) -> None:
    following = run.following()
    assert not following["is_over"]
    assert following["draft"] != "draft-000001", "a better draft is drafted with"
    assert following["seconds"]["training"] + following["seconds"]["training in quiet time"] > 0


def test_a_training_that_is_asked_for_is_waited_for(server: Server, run: Run) -> None:
    before = sum(run.following()["trainings"].values())
    with ApiClient(server.base_url, server.api_key) as client:
        outcome = DraftTrainer.ask(client, "tiny").outcome()
    assert re.fullmatch(
        r"\d+ steps: \d\.\d\d tokens of a draft are expected to be accepted, before \d\.\d\d; "
        r"(it is drafted with|not used)",
        outcome,
    )
    assert sum(run.following()["trainings"].values()) > before
