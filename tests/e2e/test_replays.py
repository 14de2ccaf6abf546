"""A run of the official client on real weights, with default settings: computed again, branched,
compared, and its receipts checked, all beside the server that trained it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.serving import QUIET, ROOT, Server
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

NUM_STEPS = 4
BRANCH_STEP = 2


def tokens_of(number: int) -> list[int]:
    return [(7 * i * i + 13 * number) % 40_000 for i in range(40)]


def a_step(client: Client, model: Any, number: int) -> list[Any]:
    """What the client sees of it."""
    passed = model.forward_backward([client.supervised(tokens_of(number))], "cross_entropy")
    stepped = model.optim_step(client.adam())
    norm = stepped.result().metrics["unclipped_grad_l2:mean"]
    return [logprobs_of(passed.result()).tolist(), norm]


@dataclass
class Trained:
    server: Server
    gguf: Path
    client: Client
    run_id: str
    sampler_id: str
    seen: list[Any]

    def command(self, *arguments: object, data_dir: Path | None = None) -> "Done":
        place: list[object] = ["--data-dir", data_dir or self.server.data_dir]
        if arguments[0] != "diff":  # it computes nothing
            place += ["--model", f"{MODEL}={self.gguf}"]
        done = subprocess.run(
            [sys.executable, "-m", "tinkercloud", *map(str, (*arguments, *place))],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env={**os.environ, **QUIET},
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def trained(server: Server, smollm2_gguf: Path) -> Any:
    client = Client.connect(tinker, server)
    model = client.model()
    seen = [a_step(client, model, number) for number in range(BRANCH_STEP)]
    sampler = model.save_weights_and_get_sampling_client().result()
    client.sample(sampler, tokens_of(9), n=2, max_tokens=12, seed=5, temperature=1.0)
    seen += [a_step(client, model, number) for number in range(BRANCH_STEP, NUM_STEPS)]
    sampler_id = sampler._sampling_session_id
    yield Trained(server, smollm2_gguf, client, model.model_id, sampler_id, seen)
    client.close()


def test_the_run_is_computed_again_with_the_same_bits(trained: Trained) -> None:
    done = trained.command("replay", trained.run_id)
    assert done.status == 0, done.err
    assert f"steps 1 to {NUM_STEPS}" in done.out.splitlines()[0]
    # created, passes and steps, and weights published once
    num = 2 + 2 * NUM_STEPS
    assert done.out.splitlines()[-1] == f"all {num} operations gave the bits on record"


@pytest.mark.slow
def test_a_branch_goes_on_bit_for_bit_and_is_told_from_its_run_where_it_leaves_it(
    trained: Trained,
) -> None:
    done = trained.command("branch", trained.run_id, "--step", BRANCH_STEP)
    assert done.status == 0, done.err
    service = trained.client.service
    branch = service.create_training_client_from_state_with_optimizer(done.out.strip()).result()
    steps = [a_step(trained.client, branch, n) for n in range(BRANCH_STEP, NUM_STEPS)]
    assert steps == trained.seen[BRANCH_STEP:]

    again = trained.client.model()
    assert a_step(trained.client, again, 0) == trained.seen[0]
    a_step(trained.client, again, 77)
    done = trained.command("diff", trained.run_id, again.model_id)
    assert done.status == 1, done.err
    assert done.out.splitlines()[-1].startswith("first difference: datum 0: tokens[")
    assert "step 2" in done.out.splitlines()[-2]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sample", "step"])
def test_a_receipt_is_verified_by_a_stranger(trained: Trained, tmp_path: Path, what: str) -> None:
    """With the base model, the receipt and the weights alone."""
    subject, number = (trained.sampler_id, 0) if what == "sample" else (trained.run_id, 3)
    weights, receipt = tmp_path / "weights", tmp_path / "receipt.json"
    done = trained.command("receipt", subject, f"--{what}", number, "--weights", weights)
    assert done.status == 0, done.err
    receipt.write_text(done.out)
    check = ("verify", receipt, "--weights", weights)
    done = trained.command(*check, data_dir=tmp_path / "elsewhere")
    assert done.status == 0, done.err
    assert done.out.startswith("verified: ")
