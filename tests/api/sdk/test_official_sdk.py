"""The official SDK and its command line against a server process on the fake backend."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli as cli

from tests import serving
from tests.api.thread_server import ADAM, DATA, MODEL, PROMPT, thread_server


@pytest.fixture
def service(sdk_server: serving.Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(user_metadata={"k": "v"})
    yield client
    client.close("success").result()


def training(service: tinker.ServiceClient, rank: int = 8) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=rank, seed=1).result()


def train(client: tinker.TrainingClient, data: list[types.Datum] = DATA) -> float:
    """One pipelined step; the loss before it."""
    loss = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(ADAM)
    assert step.result().metrics["unclipped_grad_l2:mean"] > 0
    return loss.result().metrics["loss:sum"]


def test_metrics_of_rl_are_the_same_in_chunks_and_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(rng.integers(0, 1000, n).tolist()),
            loss_fn_inputs={
                "target_tokens": rng.integers(0, 1000, n),
                "logprobs": (-7 + rng.normal(size=n)).astype(np.float32),
                "advantages": rng.normal(size=n).astype(np.float32),
            },
        )
        for n in (3, 8, 2, 5, 1)
    ]
    found = []
    for max_datums in (2, 1024):
        folder = tmp_path / str(max_datums)
        with thread_server(folder, fwdbwd_max_chunk_len=max_datums) as (base_url, api_key):
            client = training(tinker.ServiceClient(base_url=base_url, api_key=api_key))
            found.append(client.forward_backward(data, "ppo").result().metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert {"ppo_kl:mean", "pg_clipfrac:mean", "ratio:mean", "ratio:max"} <= set(found[0])
    assert 0 < found[0]["pg_clipfrac:mean"] < 1


def test_three_hundred_samples_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    futures = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, seed=seed))
        for seed in range(300)
    ]
    drawn = {tuple(future.result().sequences[0].tokens) for future in futures}
    assert len(drawn) > 200


def command_line(*arguments: str) -> str:
    finished = CliRunner().invoke(cli, arguments)
    assert finished.exit_code == 0, finished.output
    return finished.output


def test_the_command_line_lists_and_changes_checkpoints(
    service: tinker.ServiceClient,
) -> None:
    client = training(service)
    path = client.save_state("listed").result().path
    run_id = client.get_info().model_id
    assert MODEL in command_line("model", "list")
    assert run_id in command_line("--format", "json", "run", "list")
    assert path in command_line("--format", "json", "checkpoint", "list")
    command_line("checkpoint", "set-ttl", path, "--ttl", "7200")
    rest = tinker.RestClient()
    [listed] = rest.list_checkpoints(run_id).result().checkpoints
    assert listed.expires_at is not None
    command_line("checkpoint", "set-ttl", path, "--remove")
    command_line("checkpoint", "delete", path, "--yes")
    assert rest.list_checkpoints(run_id).result().checkpoints == []


def test_a_sample_of_too_many_alternatives_fails_once_and_says_the_numbers(
    service: tinker.ServiceClient,
) -> None:
    """Not a refused POST: the client would send that again."""
    sampler = service.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints([1] * 1024)
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    begun = time.monotonic()
    future = sampler.sample(
        prompt, 1000, params, topk_prompt_logprobs=1000, topk_sample_logprobs=500
    )
    with pytest.raises(tinker.RequestFailedError, match=r"topk_prompt_logprobs 1000 x 1024"):
        future.result(timeout=30)
    assert time.monotonic() - begun < 10
