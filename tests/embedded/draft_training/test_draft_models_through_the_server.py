"""Draft models through servers with the official client: samples are those without drafts, bit for
bit, while a draft learns in quiet time from samples alone, and comes into use if it is better."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from transformers import LlamaForCausalLM

from tests.embedded.draft_training.test_planted_shift import style
from tests.embedded.tiny import write_tiny_model
from tests.serving import Server, start_server
from tinkercloud.embedded.forward import runners

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
LONGEST_S, LEAST_CASES, NUMBERS = 300.0, 64, 6
STYLE_STEPS, STYLE_RATE = 60, 3e-3
RATE, WORSE_RATE = 3e-3, 0.1  # one at which a draft learns, and one at which it forgets
Samples = list[tuple[list[int], list[float] | None]]


@pytest.fixture(scope="module")
def target(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on a style, which the model in `folder` does not know."""
    path = write_tiny_model(tmp_path_factory.mktemp("target"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=STYLE_RATE)
    for step in range(STYLE_STEPS):
        ids = torch.tensor([style(16 * step + i) for i in range(16)])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def damaged(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a layer gone wrong: half of its tokens are accepted."""
    path = write_tiny_model(tmp_path_factory.mktemp("damaged"))
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def start(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:

        def started(*flags: str) -> Server:
            flags = ("--backend", "embedded", "--model", f"tiny={target}", *flags)
            data_dir = tmp_path_factory.mktemp("server") / "data"
            return stack.enter_context(
                start_server(*flags, "--engine-threads", "1", data_dir=data_dir)
            )

        yield started


@pytest.fixture(scope="module")
def plain(start: Any) -> list[Samples]:
    """Of each number, without drafts."""
    server = start("--speculate", "off")
    samples = [sampled(sampler_of(server), number) for number in range(NUMBERS)]
    server.stop()
    return samples


def sampler_of(server: Server) -> tinker.SamplingClient:
    service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
    return service.create_sampling_client(base_model="tiny").result()


def sampled(sampler: tinker.SamplingClient, number: int) -> Samples:
    """Of four prompts at once, one or two of each, at several temperatures."""
    futures = []
    for i, temperature in enumerate((0.0, 0.5, 1.0, 1.0)):
        prompt = tinker.ModelInput.from_ints(style(9000 + 10 * number + i, 3 + 5 * i))
        params = tinker.SamplingParams(
            max_tokens=24 + i, temperature=temperature, seed=number, stop=[]
        )
        futures.append(sampler.sample(prompt, num_samples=1 + i % 2, sampling_params=params))
    found = [one for future in futures for one in future.result().sequences]
    return [(list(one.tokens), one.logprobs) for one in found]


def figures(server: Server) -> dict[str, Any]:
    return server.http().get("/health").json()["speculation"]["tiny"]


def num_accepted(server: Server) -> int:
    depths = figures(server)["drafters"]["model"]["depths"]
    return sum(depth["accepted"] for depth in depths)


def trained_in_quiet(server: Server, plain: list[Samples], outcome: str) -> dict[str, Any]:
    """Samples until a training has this outcome, compared with those without drafts. All that is
    between two of them is quiet time."""
    sampler, deadline, number = sampler_of(server), time.monotonic() + LONGEST_S, 0
    while True:
        assert sampled(sampler, number % len(plain)) == plain[number % len(plain)]
        number += 1
        counters = figures(server)
        if counters["following"]["trainings"][outcome]:
            break
        assert not counters["following"]["trainings"]["failed"], counters
        assert time.monotonic() < deadline, counters
        time.sleep(1.0)
    for again, samples in enumerate(plain):
        assert sampled(sampler, again) == samples
    return figures(server)["following"]


def learning(draft: Path, rate: float) -> tuple[str, ...]:
    sizes = ("--draft-least-cases", str(LEAST_CASES), "--draft-rate", str(rate))
    return ("--speculate", f"model:{draft}", *sizes, "--draft-acceptance", "1.0")


def test_a_draft_model_learns_from_samples_alone_and_no_bit_of_them_changes(
    start: Any, folder: Path, plain: list[Samples]
) -> None:
    server = start(*learning(folder, RATE))
    following = trained_in_quiet(server, plain, "used")
    assert following["draft"] != "draft-000001", "the trained one is drafted with"
    assert following["policy_steps"] == 0 and following["seconds"]["training"] == 0
    assert following["seconds"]["training in quiet time"] > 0
    # Whether a draft of so small a model pays is a matter of microseconds: the server may leave it
    # be for hundreds of rounds before it tries again.
    sampler, deadline, number = sampler_of(server), time.monotonic() + LONGEST_S, 0
    while not num_accepted(server):
        assert time.monotonic() < deadline, figures(server)
        assert sampled(sampler, number % NUMBERS) == plain[number % NUMBERS]
        number += 1


@pytest.mark.slow
def test_a_draft_model_that_has_become_worse_is_refused(
    start: Any, damaged: Path, plain: list[Samples]
) -> None:
    server = start(*learning(damaged, WORSE_RATE))
    following = trained_in_quiet(server, plain, "refused")
    last = following["last_training"]
    assert following["trainings"]["used"] == 0 and following["draft"] == "draft-000001"
    assert not last["promoted"] and last["after"]["mean"] < last["before"]["mean"]
