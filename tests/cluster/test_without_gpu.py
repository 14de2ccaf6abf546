"""The walk-through without a GPU as the page has it, on a tiny model: it trains and samples, and
goes on when Ray's daemon is killed."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tinker
import torch
from tinker import types

from tests.cluster.cpu.engines import sglang_command, write_served_model
from tests.docs.pages import pages
from tests.docs.test_commands import commands_of
from tests.serving import ROOT, Server, running
from tests.waiting import wait_for
from tinkercloud.cluster.cpu.presence import refuse_cuda
from tinkercloud.config import stand_ins_variables
from tinkercloud.errors import ConfigError

PROMPT = types.ModelInput.from_ints(tokens=[5, 17, 42, 8, 99])
LIMIT_S = 300.0  # in which engines start, too


def documented_arguments(model: Path) -> list[str]:
    """Those of the page's `serve`, with this model and this checkout's SGLang."""
    page = next(page for page in pages() if page.name == "docs/backends.md")
    (command,) = [c for c in commands_of(page) if "--cluster-device cpu" in c]
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("server/bin/tinkercloud", "serve")
    filled = {"--model": f"tiny={model}", "--cluster-sglang-command": shlex.join(sglang_command())}
    for flag, value in filled.items():
        arguments[arguments.index(flag) + 1] = value
    return arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("without_gpu")
    (folder / "model").mkdir()
    model = write_served_model(folder / "model")
    home = folder / "home"
    home.mkdir()
    unset = {name: "" for name in os.environ if name.startswith("RAY_AUTH_")}
    environment = {**unset, "HOME": str(home)}
    with running(Server(documented_arguments(model), folder / "data", environment)) as server:
        yield server
    assert not (home / ".ray" / "auth_token").exists()


@pytest.fixture(scope="module")
def client(server: Server) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)


def sampled(sampler: tinker.SamplingClient) -> list[int]:
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    answer = sampler.sample(prompt=PROMPT, num_samples=1, sampling_params=params)
    return list(answer.result(timeout=LIMIT_S).sequences[0].tokens)


def until_ready(server: Server, status: int) -> str:
    with server.http(authenticated=False) as http:
        answered = wait_for(
            f"/readyz answers {status}",
            lambda: ((answer := http.get("/readyz")).status_code, answer.text),
            lambda answer: answer[0] == status,
            limit_s=LIMIT_S,
            poll_s=0.1,
        )
    return answered[1]


def test_it_trains_and_samples_and_goes_on_when_the_raylet_is_killed(
    server: Server, client: tinker.ServiceClient
):
    model = client.create_lora_training_client("tiny", rank=8, seed=3).result(timeout=LIMIT_S)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens=[5, 17, 42]),
            loss_fn_inputs={"target_tokens": [17, 42, 8], "weights": [1.0, 1.0, 1.0]},
        )
    ]
    losses = []
    for _ in range(3):
        output = model.forward_backward(data, "cross_entropy").result(timeout=LIMIT_S)
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=LIMIT_S)
        losses.append(output.metrics["loss:sum"])
    assert losses[2] < losses[0]
    sampler = model.save_weights_and_get_sampling_client().result(timeout=LIMIT_S)
    tokens = sampled(sampler)
    until_ready(server, 200)
    assert server.process is not None
    below = psutil.Process(server.process.pid).children(recursive=True)
    (raylet,) = [process for process in below if process.name() == "raylet"]
    raylet.kill()
    assert "raylet" in until_ready(server, 503)
    assert sampled(sampler) == tokens
    until_ready(server, 200)


class TestStandIns:
    def test_a_machine_with_a_gpu_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
        with pytest.raises(ConfigError, match=r"this one has 2 \(H100\): leave the flag out"):
            refuse_cuda()

    @pytest.mark.parametrize("wanted", [False, True])
    def test_an_engine_finds_them_only_where_the_flag_asks_for_them(self, wanted: bool):
        script = (
            "import importlib.util; import tinkercloud.cluster.sglang; "
            "print(importlib.util.find_spec('sgl_kernel') is not None)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **(stand_ins_variables() if wanted else {})},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert answer.stdout.strip() == str(wanted)
