"""RolloutManager on a real SGLang server: what it samples and scores, against the embedded engine
and transformers; adapters side by side; engines that die; the gate and the memory calls."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.cluster.cpu import recorder
from tests.cluster.cpu.engines import (
    CONTEXT,
    logprobs,
    processes,
    settings,
    sglang_command,
    sglang_environment,
    wait_until_ended,
    write_served_model,
)
from tests.cluster.ray_cluster import one_node
from tests.embedded.tiny import (
    EOS,
    Sampler,
    ask,
    open_store,
    random_prompt,
    reference,
    supervised,
    train,
)
from tests.gpu import bodies
from tinkercloud.cluster.rollout.engine_client import EngineRefused
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.cluster.rollout.token_streams import TokenStreams
from tinkercloud.core.types import (
    AdamParams,
    FromBase,
    FromModel,
    Grammar,
    LoraSpec,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TokenChunk,
)
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.errors import EngineDied, UserError, VersionLost

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Float32 sums in two orders, through an unembedding that was made 20 times as steep.
LIMIT = 5e-5
PROMPT = random_prompt(23, seed=4)


@dataclass
class Bench:
    """The same model served by SGLang and by the embedded engine."""

    manager: RolloutManager
    store: ModelStore
    embedded: Sampler
    base: str
    record: Path
    folder: Path

    async def both(
        self, request: SampleRequest, adapter: str | None = None, version: str | None = None
    ) -> tuple[SampleOutput, SampleOutput]:
        """SGLang's answer and the embedded engine's."""
        cluster = await self.manager.generate(adapter, request)
        return cluster, self.embedded.one(version or self.base, request)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """One engine behind a recorder, its processes spawned as SGLang does it elsewhere."""
    logs = tmp_path_factory.mktemp("logs")
    folder = write_served_model(tmp_path_factory.mktemp("model"))
    record = logs / "calls.jsonl"
    command = recorder.recorded(record, sglang_command())
    spawning = sglang_environment("spawn")
    manager = RolloutManager(settings(folder, logs, command=command, environment=spawning), [()])
    await manager.start()
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    yield Bench(manager, store, Sampler(store), base, record, folder)
    engine = processes(manager)
    shared = shared_memory_files(engine[2:])
    assert shared, "the engine has none: this test would see none that it leaves"
    await manager.stop()
    await wait_until_ended(engine)
    assert not [path for path in shared if path.exists()], "shared memory outlived its engine"


def assert_same(ours: SampledSequence, theirs: SampledSequence) -> None:
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.stop_reason == theirs.stop_reason
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=LIMIT, rtol=0)


def shared_memory_files(engine: Sequence[psutil.Process]) -> list[Path]:
    """Those that its processes have open and that have a name."""
    mapped = {Path(entry.path) for process in engine for entry in process.memory_maps()}
    return [path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()]


# ---- sampling


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "seed": 77},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.7, "top_p": 0.9},
    ],
    ids=str,
)
async def test_the_same_seed_gives_the_tokens_of_the_embedded_engine(bench, params):
    ours, theirs = await bench.both(ask(PROMPT, n=4, max_tokens=24, **params))
    assert len(ours.sequences) == 4
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)
    if params["temperature"] > 0:
        assert len({tuple(s.tokens.tolist()) for s in ours.sequences}) > 1


async def test_requests_with_different_sampling_parameters_in_one_batch_do_not_change_each_other(
    bench,
):
    choices = [
        {"temperature": t, "top_k": k, "seed": 5 * k + 9} for t in (0.0, 0.8) for k in (-1, 3)
    ]
    requests = [
        ask(random_prompt(9 + i, seed=i), n=2, max_tokens=16, **params)
        for i, params in enumerate(choices)
    ]
    together = await asyncio.gather(*(bench.manager.generate(None, r) for r in requests))
    for request, ours in zip(requests, together, strict=True):
        theirs = bench.embedded.one(bench.base, request)
        for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert_same(mine, other)


def key_of(manager: RolloutManager) -> dict[str, str]:
    return {"authorization": f"Bearer {manager._settings.key}"}


async def test_who_has_no_key_is_refused_by_engines_and_router(bench):
    generate = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    calls = {
        "/generate": generate,
        "/load_lora_adapter": {"lora_name": "x", "lora_path": "/"},
        "/update_weights_from_disk": {"model_path": "/"},
        "/abort_request": {"rid": "x"},
    }
    [engine] = bench.manager.engine_urls()
    async with httpx.AsyncClient(timeout=60) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for path, body in calls.items():
                refused = await http.post(engine + path, json=body, headers=headers)
                assert refused.status_code == 401, (path, refused.text)
            for path in ("/server_info", "/v1/models"):
                assert (await http.get(engine + path, headers=headers)).status_code == 401, path
            router = bench.manager.get_router_address()
            refused = await http.post(f"{router}/generate", json=generate, headers=headers)
            assert refused.status_code == 401, refused.text
            assert (await http.get(f"{router}/workers", headers=headers)).status_code == 401
        key = key_of(bench.manager)
        assert (
            await http.post(f"{engine}/generate", json=generate, headers=key)
        ).status_code == 200
    assert all("127.0.0.1" in url for url in (engine, router))
    text = key["authorization"].removeprefix("Bearer ")
    for process in processes(bench.manager):  # where everybody on the machine could read it
        assert text not in " ".join(process.cmdline())


async def test_a_request_without_our_parameters_is_sampled_by_sglang_in_the_same_batch(bench):
    """Through the router, as any client of SGLang would; greedy, so that its answer is known."""
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 2}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    url = f"{bench.manager.get_router_address()}/generate"
    long = bench.manager.generate(None, ask(PROMPT, n=3, max_tokens=64, seed=9))
    async with httpx.AsyncClient(headers=key_of(bench.manager), timeout=60) as http:
        plain, ours = await asyncio.gather(http.post(url, json=body), long)
    rows = plain.json()["meta_info"]["output_token_logprobs"]
    greedy = ask(PROMPT, max_tokens=16, temperature=0.0, use_eos=False)
    expected = bench.embedded.one(bench.base, greedy).sequences[0]
    assert [row[1] for row in rows] == expected.tokens.tolist()
    np.testing.assert_allclose([row[0] for row in rows], expected.logprobs, atol=LIMIT, rtol=0)
    theirs = bench.embedded.one(bench.base, ask(PROMPT, n=3, max_tokens=64, seed=9))
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)


async def test_topk_of_sampled_tokens_is_of_the_distribution_sampled_from(bench):
    request = ask(PROMPT, n=2, max_tokens=8, temperature=0.7, top_k=4, topk_sample_logprobs=6)
    ours, theirs = await bench.both(request)
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert mine.topk is not None and other.topk is not None
        np.testing.assert_array_equal(mine.topk.token_ids, other.topk.token_ids)
        np.testing.assert_allclose(mine.topk.logprobs, other.topk.logprobs, atol=LIMIT, rtol=0)
        assert (mine.topk.logprobs[:, 4:] == -99999.0).all()


# ---- streams, and requests that are cancelled


def assert_streamed(chunks: list[TokenChunk], output: SampleOutput) -> None:
    for index, sequence in enumerate(output.sequences):
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        assert [int(t) for c in own for t in c.tokens] == sequence.tokens.tolist()
        assert np.array_equal(np.concatenate([c.logprobs for c in own]), sequence.logprobs)
        assert [c.stop_reason for c in own] == [None] * (len(own) - 1) + [sequence.stop_reason]
        if sequence.topk is not None:
            ids = np.concatenate([c.topk.token_ids for c in own if c.topk is not None])
            assert np.array_equal(ids, sequence.topk.token_ids)


async def test_the_chunks_of_a_sample_are_that_sample(bench):
    """They come while the engine draws, and change nothing."""
    request = ask(
        PROMPT, n=3, max_tokens=300, seed=4, topk_sample_logprobs=2, prompt_logprobs=True,
        use_eos=False,
    )  # fmt: skip
    plain = await bench.manager.generate(None, request)
    chunks: list[tuple[float, TokenChunk]] = []
    streams = TokenStreams(request, lambda chunk: chunks.append((time.monotonic(), chunk)))
    began = time.monotonic()
    output = await bench.manager.generate(None, request, streams=streams)
    took_s = time.monotonic() - began
    assert_streamed([chunk for _, chunk in chunks], output)
    for mine, other in zip(output.sequences, plain.sequences, strict=True):
        assert_same(mine, other)
    np.testing.assert_array_equal(output.prompt_logprobs, plain.prompt_logprobs)
    times = [at - began for at, _ in chunks]
    assert times[-1] - times[0] > 0.5 * took_s, times
    assert len(chunks) > 100


async def test_a_stream_that_is_aborted_goes_on_where_it_was(bench):
    request = ask(PROMPT, n=2, max_tokens=400, seed=8, use_eos=False, frequency_penalty=0.1)
    chunks: list[TokenChunk] = []
    has_begun = asyncio.Event()

    def take(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        if len(chunks) == 40:
            has_begun.set()

    streams = TokenStreams(request, take)
    underway = asyncio.create_task(bench.manager.generate(None, request, streams=streams))
    await has_begun.wait()
    await bench.manager.pause(abort=True)
    assert not underway.done()
    num_chunks = len(chunks)
    await bench.manager.resume()
    output = await underway
    assert len(chunks) > num_chunks
    assert_streamed(chunks, output)
    theirs = bench.embedded.one(bench.base, request)
    for mine, other in zip(output.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)


async def test_what_a_stream_has_is_drawn_again_whatever_the_engine_would_draw(bench):
    """As after other rounding: the tokens that were handed on here are none that it would draw."""
    request = ask(PROMPT, n=1, max_tokens=12, seed=8, use_eos=False)
    chunks: list[TokenChunk] = []
    streams = TokenStreams(request, chunks.append)
    (plain,) = (await bench.manager.generate(None, request)).sequences
    other = [(int(token) + 1) % 256 for token in plain.tokens[:5]]
    rows = [[-0.5, token, None] for token in other]
    streams.take(0, {"finish_reason": None, "output_token_logprobs": rows})
    output = await bench.manager.generate(None, request, streams=streams)
    assert output.sequences[0].tokens[:5].tolist() == other
    assert_streamed(chunks, output)
    longer = ask([*PROMPT, *other], max_tokens=7, seed=8, use_eos=False)
    expected = bench.embedded.one(bench.base, longer).sequences[0]
    assert output.sequences[0].tokens[5:].tolist() == expected.tokens.tolist()


async def test_a_cancelled_request_leaves_the_engine(bench):
    other = ask(PROMPT, n=2, max_tokens=60, seed=3, use_eos=False)
    request = ask(PROMPT, n=4, max_tokens=900, seed=8, use_eos=False)
    for streams in (None, TokenStreams(request, lambda chunk: None)):
        call = bench.manager.generate(None, request, streams=streams)
        underway = asyncio.create_task(call)
        beside = asyncio.create_task(bench.manager.generate(None, other))
        await asyncio.sleep(0.5)
        underway.cancel()
        with pytest.raises(asyncio.CancelledError):
            await underway
        theirs = bench.embedded.one(bench.base, other)
        for mine, one in zip((await beside).sequences, theirs.sequences, strict=True):
            assert_same(mine, one)
        assert bench.manager.stats()["running"] == 0
        await bench.manager.pause()
        await bench.manager.flush_cache()  # refused while anything runs
        await bench.manager.resume()


# ---- grammars


async def test_a_grammar_is_followed_and_logprobs_are_those_under_its_mask(bench):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
    grammars = [Grammar("json_schema", json.dumps(schema)), Grammar("choice", '["yes", "n.o"]')]
    for grammar in grammars:
        request = ask(
            PROMPT, n=4, max_tokens=60, temperature=1.5, grammar=grammar, topk_sample_logprobs=260
        )
        output = await bench.manager.generate(None, request)
        ended = [s for s in output.sequences if s.stop_reason == "stop"]
        assert ended
        for sequence in ended:
            text = bytes(_byte_of(int(t)) for t in sequence.tokens if t < 256).decode()
            if grammar.kind == "choice":
                assert text in ("yes", "n.o")
            else:
                jsonschema.validate(json.loads(text), schema)
            assert sequence.topk is not None
            probs = np.exp(sequence.topk.logprobs.astype(np.float64))
            np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-4)
            assert (probs[0] > 0).sum() < 20, "few tokens begin such a text"


async def test_a_grammar_that_is_none_is_the_users_error(bench):
    for grammar in (Grammar("json_schema", "{"), Grammar("regex", "((")):
        with pytest.raises(UserError):
            await bench.manager.generate(None, ask(PROMPT, max_tokens=4, grammar=grammar))


# ---- stops and lengths


async def test_a_stop_token_ends_the_sample_and_is_part_of_it(bench):
    greedy = ask(PROMPT, max_tokens=10, temperature=0.0, use_eos=False)
    tokens = bench.embedded.one(bench.base, greedy).sequences[0].tokens.tolist()
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    ours, theirs = await bench.both(
        ask(PROMPT, max_tokens=10, temperature=0.0, stop_token_ids=(stop,), use_eos=False)
    )
    assert ours.sequences[0].tokens[-1] == stop
    assert ours.sequences[0].stop_reason == "stop"
    assert_same(ours.sequences[0], theirs.sequences[0])


async def test_a_stop_string_across_tokens_ends_the_sample_with_the_token_that_completes_it(bench):
    request = ask(PROMPT, max_tokens=200, top_k=40, use_eos=False, seed=12)
    tokens = bench.embedded.one(bench.base, request).sequences[0].tokens.tolist()
    text = bytes(b for b in map(_byte_of, tokens)).decode("latin-1")
    stop = next(
        text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii()
        and text.find(text[i : i + 2]) == i
    )  # fmt: skip
    limited = replace(request.params, stop_strings=(stop,))
    ours, theirs = await bench.both(replace(request, params=limited))
    assert ours.sequences[0].stop_reason == "stop"
    assert len(ours.sequences[0].tokens) == text.find(stop) + 2
    assert_same(ours.sequences[0], theirs.sequences[0])


def _byte_of(token: int) -> int:
    """Of the tiny model's vocabulary: the sorted byte-level alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _BYTES[alphabet[token]] if token < 256 else 0


def _byte_level() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_level()


async def test_end_of_sequence_ends_a_sample_unless_stopping_is_off(bench):
    request = ask(PROMPT, max_tokens=60, temperature=3.0, seed=1, n=8)
    ours, theirs = await bench.both(request)
    assert any(s.tokens[-1] == EOS for s in theirs.sequences), "choose another seed"
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)
    never = replace(request, params=replace(request.params, use_eos=False))
    ours, theirs = await bench.both(never)
    assert {s.stop_reason for s in ours.sequences} == {"length"}
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize("length", [CONTEXT - 3, CONTEXT - 1])
async def test_without_max_tokens_a_sample_runs_to_the_context_limit(bench, length):
    prompt = random_prompt(length, seed=3)
    ours, theirs = await bench.both(ask(prompt, max_tokens=None, use_eos=False))
    assert len(ours.sequences[0].tokens) == CONTEXT - length
    assert_same(ours.sequences[0], theirs.sequences[0])


async def test_a_prompt_beyond_the_context_is_the_users_error(bench):
    with pytest.raises(UserError, match="longer than"):
        await bench.manager.generate(None, ask(random_prompt(CONTEXT + 20, seed=0), max_tokens=1))


async def test_a_seed_out_of_range_is_refused_before_an_engine_sees_it(bench):
    with pytest.raises(UserError, match="seed"):
        await bench.manager.generate(None, ask(PROMPT, max_tokens=1, seed=-4))


# ---- prompts


async def test_prompt_logprobs_are_those_of_transformers(bench):
    prompt = random_prompt(300, seed=8)
    output = await bench.manager.generate(None, ask(prompt, max_tokens=1, prompt_logprobs=True))
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    expected = logprobs(reference(bench.folder), prompt)
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("last_n", [None, 5, 1000])
async def test_prompt_logprobs_are_those_of_the_embedded_engine(bench, last_n):
    prompt = random_prompt(150, seed=6)
    targets = np.random.default_rng(2).integers(-1, 260, (149, 3))
    targets[70] = -1
    request = ask(
        prompt, n=2, max_tokens=2, temperature=0.5, prompt_logprobs=True,
        prompt_logprobs_last_n=last_n, topk_prompt_logprobs=4, target_prompt_logprobs=targets,
    )  # fmt: skip
    ours, theirs = await bench.both(request)
    near = {"atol": LIMIT, "rtol": 0}
    np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, **near)
    np.testing.assert_array_equal(
        ours.topk_prompt_logprobs.token_ids, theirs.topk_prompt_logprobs.token_ids
    )
    np.testing.assert_allclose(
        ours.topk_prompt_logprobs.logprobs, theirs.topk_prompt_logprobs.logprobs, **near
    )
    np.testing.assert_allclose(ours.target_prompt_logprobs, theirs.target_prompt_logprobs, **near)
    assert (ours.target_prompt_logprobs[70] == 0).all()


async def test_a_prompt_seen_before_is_taken_from_the_cache(bench):
    prompt = random_prompt(64, seed=99)
    await bench.manager.flush_cache()
    first = await bench.manager.generate(None, ask(prompt, max_tokens=1))
    second = await bench.manager.generate(None, ask(prompt, max_tokens=1))
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens > 50) == (0, True)


# ---- adapters


SPECS = {
    "all": LoraSpec(rank=8, seed=1),
    "attention": LoraSpec(rank=4, seed=2, train_mlp=False, train_unembed=False),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Path]]:
    """name -> (the embedded engine's version, the adapter's folder); loaded."""
    made = {}
    for name, spec in SPECS.items():
        bench.store.create_model(name, "tiny", spec)
        for step in range(3):
            train(bench.store, name, [supervised(30, seed=step)])
            bench.store.optim_step(name, AdamParams(learning_rate=0.05))
        folder = tmp_path_factory.mktemp(name)
        bench.store.save_model(name, folder, False)
        made[name] = (bench.store.publish(FromModel(name)), folder)
        await bench.manager.load_adapter(name, folder)
    return made


async def test_adapters_side_by_side_answer_each_with_its_weights(bench, trained):
    request = ask(PROMPT, n=2, max_tokens=16, seed=3, prompt_logprobs=True)
    names = [None, "all", "attention", "all", None]
    outputs = await asyncio.gather(*(bench.manager.generate(n, request) for n in names))
    for name, ours in zip(names, outputs, strict=True):
        version = trained[name][0] if name else bench.base
        theirs = bench.embedded.one(version, request)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=LIMIT, rtol=0)
        for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert_same(mine, other)
    scores = [outputs[i].prompt_logprobs[1:] for i in (0, 1, 2)]
    assert min(np.abs(scores[a] - scores[b]).max() for a, b in ((0, 1), (0, 2), (1, 2))) > 0.01


async def test_an_engine_whose_actor_is_killed_leaves_no_process_and_restarts_with_its_adapters(
    bench, trained
):
    before = processes(bench.manager)
    request = ask(PROMPT, n=2, max_tokens=400, seed=3, use_eos=False)
    underway = asyncio.create_task(bench.manager.generate("all", request))
    await asyncio.sleep(0.5)
    before[0].send_signal(signal.SIGKILL)
    await wait_until_ended(before[1:])
    ours, theirs = await underway, bench.embedded.one(trained["all"][0], request)
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)
    assert bench.manager.stats()["engine_restarts"] == 1
    async with httpx.AsyncClient(headers=key_of(bench.manager)) as http:
        workers = (await http.get(f"{bench.manager.get_router_address()}/workers")).json()
    assert [w["url"] for w in workers["workers"]] == list(bench.manager.engine_urls())


async def test_an_unloaded_adapter_is_lost(bench, trained):
    await bench.manager.load_adapter("short-lived", trained["all"][1])
    await bench.manager.unload_adapter("short-lived")
    with pytest.raises(VersionLost):
        await bench.manager.generate("short-lived", ask(PROMPT, max_tokens=1))
    last = recorder.calls(bench.record, "/load_lora_adapter", "/unload_lora_adapter")[-2:]
    assert [(call["path"], call["body"]["lora_name"]) for call in last] == [
        ("/load_lora_adapter", "short-lived"),
        ("/unload_lora_adapter", "short-lived"),
    ]


async def test_an_adapter_that_fails_to_load_is_on_no_engine(bench, tmp_path):
    with pytest.raises(EngineRefused):
        await bench.manager.load_adapter("broken", tmp_path)
    with pytest.raises(VersionLost):
        await bench.manager.generate("broken", ask(PROMPT, max_tokens=1))


# ---- the gate


async def test_pausing_waits_for_running_requests_and_admits_none(bench):
    long = asyncio.create_task(bench.manager.generate(None, ask(PROMPT, 1, 300, use_eos=False)))
    await asyncio.sleep(0.1)
    await bench.manager.pause()
    assert long.done()
    waiting = asyncio.create_task(bench.manager.generate(None, ask(PROMPT, max_tokens=1)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await bench.manager.resume()
    assert len((await waiting).sequences) == 1


async def test_a_request_that_was_aborted_and_sent_again_gives_the_same_tokens(bench):
    request = ask(PROMPT, n=2, max_tokens=900, seed=8, use_eos=False)
    underway = asyncio.create_task(bench.manager.generate(None, request))
    await asyncio.sleep(0.5)
    await bench.manager.pause(abort=True)
    assert not underway.done()
    await bench.manager.resume()
    ours, theirs = await underway, bench.embedded.one(bench.base, request)
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert_same(mine, other)


async def test_memory_is_released_when_idle_and_resumed_in_the_requested_order(bench):
    seen = len(recorder.calls(bench.record))
    request = ask(PROMPT, max_tokens=200, seed=2, use_eos=False)
    underway = asyncio.create_task(bench.manager.generate(None, request))
    await asyncio.sleep(0.1)
    await bench.manager.offload()
    waiting = asyncio.create_task(bench.manager.generate(None, ask(PROMPT, max_tokens=1)))
    for tag in ("weights", "cuda_graph", "kv_cache"):
        assert not waiting.done()
        await bench.manager.onload([tag])
    await waiting
    assert_same((await underway).sequences[0], bench.embedded.one(bench.base, request).sequences[0])
    asked = [
        (call["path"], call["body"].get("tags"))
        for call in recorder.calls(bench.record)[seen:]
        if call["path"] != "/workers"
    ]
    assert asked == [
        ("/generate", None),
        ("/release_memory_occupation", ["weights", "kv_cache", "cuda_graph"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["cuda_graph"]),
        ("/resume_memory_occupation", ["kv_cache"]),
        ("/generate", None),
    ]


async def test_an_engine_answers_as_before_once_its_memory_is_resumed(bench):
    request = ask(PROMPT, n=2, max_tokens=20, seed=3)
    bodies.compare_rested(await bodies.rested(bench.manager, request, free_bytes=lambda: 0))


async def test_memory_that_was_not_released_is_not_resumed(bench):
    """SGLang's scheduler dies of it."""
    seen = len(recorder.calls(bench.record))
    await bench.manager.onload()
    assert recorder.calls(bench.record)[seen:] == []


# ---- starting


async def test_a_server_that_cannot_start_says_why_and_leaves_no_process(bench, tmp_path):
    broken = settings(bench.folder, tmp_path, more_options=("--no-such-option",), router=False)
    manager = RolloutManager(broken, [()])
    with pytest.raises(EngineDied, match="unrecognized arguments: --no-such-option"):
        await manager.start()
    assert manager.engine_urls() == ()
