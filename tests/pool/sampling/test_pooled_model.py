"""Samples of a pool's model, between the server's backends and a scripted llama-server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.harness import serving
from tests.pool.pools import write_pool
from tests.pool.sampling.scripted_llama import ScriptedLlama
from tests.pool.sampling.small_gguf import SIZE, write_small_gguf
from tinkercloud.backends.fake import FakeBackend
from tinkercloud.chat.text_model import TextModel
from tinkercloud.config import Config
from tinkercloud.core.types import (
    FromBase,
    FromCheckpoint,
    Grammar,
    LoraSpec,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TokenChunk,
)
from tinkercloud.decoding.distribution import distribution
from tinkercloud.errors import ConfigError, UpstreamUnreachable, UserError, VersionLost
from tinkercloud.pool.sampling.backend import PooledBackend
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

PROMPT = np.array([65, 97], np.int32)
GREEDY = SamplingParams(40, 7, temperature=0.0)
WARM = SamplingParams(40, 7, temperature=0.7, top_k=50, top_p=0.95, min_p=0.01)


class Bench:
    """A pool's model `spare` beside the fake backend's own."""

    def __init__(self, backend: PooledBackend, llama: ScriptedLlama, version: str):
        self.backend, self.llama, self.version = backend, llama, version

    async def sample(
        self, drawn_by: SamplingParams, chunks: list[TokenChunk] | None = None, **fields: Any
    ) -> SampleOutput:
        request = replace(SampleRequest(PROMPT, 1, drawn_by), **fields)
        on_tokens = None if chunks is None else chunks.append
        return await self.backend.sample(self.version, request, on_tokens)

    def expected(self, output: SampleOutput, params: SamplingParams) -> np.ndarray:
        """Log-probabilities of the sampled tokens, by the made model."""
        tokens = [int(PROMPT[-1]), *output.sequences[0].tokens.tolist()]
        rows = [self.llama.after(token) for token in tokens[:-1]]
        if params.temperature:
            rows = [distribution(row, params) for row in rows]
        return np.array([row[token] for row, token in zip(rows, tokens[1:], strict=True)])


@asynccontextmanager
async def opened(folder: Path, *, drafts: bool = False, **model: Any) -> AsyncIterator[Bench]:
    backend, llama = made(folder, drafts=drafts, **model)
    await backend.start()
    try:
        yield Bench(backend, llama, await backend.publish(FromBase("spare")))
    finally:
        await backend.stop()


def made(
    folder: Path, *, drafts: bool = False, **model: Any
) -> tuple[PooledBackend, ScriptedLlama]:
    path = write_small_gguf(folder / "spare.gguf")
    text = TextModel.of_folder("spare", ensure_tokenizer_folder(path, folder / "cache"))
    llama = ScriptedLlama(text.codec, SIZE, "spare", drafts)
    values = {"name": "spare", "path": str(path), "context": 1024, "parallel": 2} | model
    pool = write_pool(folder, [values], [], memory="500MiB")
    inner = FakeBackend(Config(data_dir=folder / "data", backend="fake"))
    transport = httpx.MockTransport(llama.answer)
    return PooledBackend(inner, pool.file, folder / "cache", transport), llama


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as made:
        yield made


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
async def test_log_probabilities_are_those_of_the_distribution_drawn_from(
    bench: Bench, params: SamplingParams
) -> None:
    output = await bench.sample(params)
    sequence = output.sequences[0]
    assert len(sequence.tokens) == 40 and sequence.stop_reason == "length"
    np.testing.assert_allclose(sequence.logprobs, bench.expected(output, params), atol=1e-5)


async def test_greedy_samples_are_the_likeliest_tokens(bench: Bench) -> None:
    output = await bench.sample(GREEDY)
    token, likeliest = int(PROMPT[-1]), list[int]()
    for _ in range(40):
        token = int(np.argmax(bench.llama.after(token)))
        likeliest.append(token)
    assert output.sequences[0].tokens.tolist() == likeliest


async def test_a_seed_repeats_its_samples_and_they_differ_from_each_other(bench: Bench) -> None:
    first = await bench.sample(WARM, num_samples=3)
    again = await bench.sample(WARM, num_samples=3)
    other = await bench.sample(replace(WARM, seed=8), num_samples=3)
    texts = [[tuple(s.tokens.tolist()) for s in each.sequences] for each in (first, again, other)]
    assert texts[0] == texts[1]
    assert len({*texts[0], *texts[2]}) == 6


async def test_a_stream_is_the_sample_that_is_answered_whole(bench: Bench) -> None:
    chunks = list[TokenChunk]()
    streamed = await bench.sample(WARM, chunks, topk_sample_logprobs=3)
    whole = await bench.sample(WARM, topk_sample_logprobs=3)
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    assert len(chunks) > 1 and [c.stop_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].stop_reason == "length"
    for sequence in (streamed.sequences[0], whole.sequences[0]):
        assert tokens.tolist() == sequence.tokens.tolist()
        topk = sequence.topk
        assert topk is not None and topk.token_ids.shape == (40, 3)
        # The first of them is the likeliest, and what was drawn is no likelier.
        assert (topk.logprobs[:, 0] >= sequence.logprobs - 1e-6).all()


async def test_a_stop_token_ends_a_sample_and_is_its_last(bench: Bench) -> None:
    whole = (await bench.sample(GREEDY)).sequences[0].tokens.tolist()
    stop = whole[20]
    params = replace(GREEDY, stop_token_ids=(stop,))
    sequence = (await bench.sample(params)).sequences[0]
    assert sequence.tokens.tolist() == whole[: whole.index(stop) + 1]
    assert sequence.stop_reason == "stop"


async def test_a_token_within_a_character_gets_its_log_probability_too(bench: Bench) -> None:
    """The made model's tokens are such bytes often; see `ends_within_a_character`."""
    read = (await bench.sample(WARM)).sequences[0]
    num_asked_again = sum("logit_bias" in body for body in bench.llama.bodies)
    unread = (await bench.sample(WARM, needs_logprobs=False)).sequences[0]
    assert np.isfinite(read.logprobs).all()
    assert np.isnan(unread.logprobs).sum() == num_asked_again > 0
    assert unread.tokens.tolist() == read.tokens.tolist()


async def test_samples_are_drafted_for_where_nobody_reads_their_log_probabilities(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, drafts=True, draft="suffix") as bench:
        with pytest.raises(UserError, match=r"with drafts, of which llama\.cpp"):
            await bench.sample(GREEDY)
        output = await bench.sample(GREEDY, needs_logprobs=False)
    assert len(output.sequences[0].tokens) == 40
    assert np.isnan(output.sequences[0].logprobs).all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_logprobs": True}, "no log-probabilities of prompts"),
        ({"topk_prompt_logprobs": 2}, "no log-probabilities of prompts"),
        ({"grammar": Grammar("regex", "a+")}, "no grammar"),
        ({"params": replace(WARM, presence_penalty=0.5)}, "penalties"),
        ({"prompt": np.array([SIZE - 1], np.int32)}, "a prompt that it refuses"),
    ],
)
async def test_what_llama_cpp_cannot_is_refused_in_a_sentence(
    bench: Bench, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        await bench.sample(WARM, **fields)


async def test_a_pool_that_is_away_or_serves_another_model_is_named(bench: Bench) -> None:
    bench.llama.alias = "another"
    with pytest.raises(UserError, match="serves another now; `tinkercloud pool swap spare`"):
        await bench.sample(GREEDY)
    bench.llama.served = 0
    with pytest.raises(UpstreamUnreachable, match=r"does not answer .*pool start"):
        await bench.sample(GREEDY)


async def test_what_users_sent_is_not_found_by_how_soon_others_are_answered(bench: Bench) -> None:
    """The first request of a sample reads its whole prompt; what follows finds its own."""
    await bench.sample(GREEDY, cache_salt="ada")
    cached = [body["cache_prompt"] for body in bench.llama.bodies]
    assert cached[0] is False and len(cached) > 1 and all(cached[1:])
    del bench.llama.bodies[:]
    await bench.sample(GREEDY)
    assert all(body["cache_prompt"] for body in bench.llama.bodies)


async def test_training_it_is_refused(bench: Bench, tmp_path: Path) -> None:
    refused = "spare is a pool's model and samples only"
    backend, lora = bench.backend, LoraSpec(8, 0)
    with pytest.raises(UserError, match=refused):
        await backend.create_model("m", "spare", lora)
    with pytest.raises(UserError, match=refused):
        await backend.load_model("m", "spare", tmp_path, with_optimizer=False)
    with pytest.raises(UserError, match=refused):
        await backend.restore_state("m", "spare", tmp_path)
    with pytest.raises(UserError, match=refused):
        await backend.publish(FromCheckpoint("spare", tmp_path))
    with pytest.raises(UserError, match=refused):
        await backend.write_version(bench.version, tmp_path)


async def test_the_other_models_are_the_inner_backends(bench: Bench) -> None:
    backend = bench.backend
    await backend.create_model("m", "fake/tiny", LoraSpec(8, 0))
    version = await backend.publish(FromBase("fake/tiny"))
    request = SampleRequest(np.array([3], np.int32), 1, GREEDY)
    assert len((await backend.sample(version, request)).sequences[0].tokens) <= 40
    await backend.release(bench.version)
    with pytest.raises(VersionLost):
        await bench.sample(GREEDY)


async def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    inner, llama = made(tmp_path)
    transport = httpx.MockTransport(llama.answer)
    outer = PooledBackend(inner, tmp_path / "pool.yaml", tmp_path / "cache", transport)
    with pytest.raises(ConfigError, match="and this server another one"):
        await outer.start()


async def test_the_server_samples_it_and_refuses_to_train_it(tmp_path: Path) -> None:
    backend, _ = made(tmp_path)
    async with serving(tmp_path / "data", backend=backend) as api:
        listed = (await api.http.get("/oai/api/v1/models")).json()["data"]
        assert {"fake/tiny", "spare"} <= {entry["id"] for entry in listed}
        body = {"model": "spare", "prompt": PROMPT.tolist(), "max_tokens": 8, "temperature": 0}
        answer = (await api.http.post("/oai/api/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 8, answer
        sampler = await api.sampler(await api.session(), base_model="spare")
        output = await api.result(await api.sample(sampler))
        assert np.isfinite(output.sequences[0].logprobs).all()
        accepted = await api.ok(
            "create_model", session_id=await api.session(), model_seq_id=0, base_model="spare"
        )
        assert "samples only" in await api.failure(accepted)
