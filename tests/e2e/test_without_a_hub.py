"""The stock cookbook and the SDK's tokenizers on a served local model, and no hub: with nothing in
the environment but the lines that the server printed."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hub import MODEL, build_hub
from tests.e2e.recipes import read_lines
from tests.serving import Server, start_server
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

pytestmark = pytest.mark.slow

SERVED = "local/smollm2"
LLAMA = "meta-llama/Llama-3.2-1B"
LIMIT_S = 400.0
NUM_STEPS, BATCH_SIZE = 2, 128  # the size is the recipe's own

# What SDKs do for `get_tokenizer()` of each client; both must agree with the served model.
TOKENIZERS = f"""
import json, tinker
with tinker.ServiceClient() as service:
    for name in ({MODEL!r}, {LLAMA!r}, {SERVED!r}):
        sampler = service.create_sampling_client(base_model=name).result()
        trainer = service.create_lora_training_client(name, rank=4).result()
        ids = [c.get_tokenizer().encode("The capital of Peru") for c in (sampler, trainer)]
        print(json.dumps(ids))
"""


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--model", f"{SERVED}={smollm2_gguf}", "--dtype", "float32"]
    for alias in (MODEL, LLAMA):
        arguments += ["--alias", f"{alias}={SERVED}"]
    with start_server(*arguments, data_dir=tmp_path_factory.mktemp("server") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def exported(server: Server) -> dict[str, str]:
    """The environment of a user who pasted what the server printed."""
    lines = re.findall(r"^export (\w+)=(\S+)$", server.output(), re.M)
    assert {"HF_HOME", "HF_HUB_OFFLINE", "TINKER_BASE_URL", "TINKER_API_KEY"} == {
        name for name, _ in lines
    }
    kept = {"PATH", "HOME", "TMPDIR", "LANG"}
    return {k: v for k, v in os.environ.items() if k in kept} | dict(lines)


def test_both_clients_find_the_tokenizer_of_a_model_and_of_its_aliases(
    exported: dict[str, str], smollm2_gguf: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder = ensure_tokenizer_folder(smollm2_gguf, tmp_path)
    ids = Tokenizer.from_file(f"{folder}/tokenizer.json").encode("The capital of Peru").ids
    output = run([sys.executable, "-c", TOKENIZERS], exported, tmp_path)
    assert [json.loads(line) for line in output.splitlines()] == [[ids, ids]] * 3


def test_the_cookbooks_first_recipe_trains_an_alias(
    exported: dict[str, str], smollm2_gguf: Path, tmp_path: Path
) -> None:
    tokenizer = ensure_tokenizer_folder(smollm2_gguf, tmp_path / "tokenizers")
    assert tokenizer is not None
    data = build_hub(tmp_path / "hub", tokenizer)
    (data / MODEL).rename(tmp_path / "unused")  # the tokenizer comes from the server's lines
    chats = data / "HuggingFaceH4" / "no_robots" / "train.jsonl"
    lines = chats.read_text().splitlines(keepends=True)
    chats.write_text("".join(itertools.islice(itertools.cycle(lines), NUM_STEPS * BATCH_SIZE)))
    log = tmp_path / "log"
    command = [
        *(sys.executable, "-m", "tinker_cookbook.recipes.sl_basic"),
        *(f"model_name={MODEL}", f"log_path={log}", "lora_rank=8", "eval_every=0"),
    ]
    run(command, exported, data)
    losses = [row["train_mean_nll"] for row in read_lines(log / "metrics.jsonl")]
    assert len(losses) == NUM_STEPS
    assert 0 < losses[1] < losses[0] < 10  # both batches have the same chats
    [last] = read_lines(log / "checkpoints.jsonl")[-1:]
    assert last["sampler_path"].startswith("tinker://")


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout
