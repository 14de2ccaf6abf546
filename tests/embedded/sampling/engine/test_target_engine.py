"""Rounds at a target worker over the real engine are the plain sample, to the last bit."""

import numpy as np
import pytest

from tests.embedded.tiny import VOCAB, Sampler, ask, random_prompt
from tinkercloud.commands.target_worker import TargetEngine
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.speculative.remote import draft_pb2
from tinkercloud.speculative.remote import target_pb2 as pb
from tinkercloud.speculative.remote.target_messages import PROTOCOL, TargetModel
from tinkercloud.speculative.remote.target_worker import TargetWorker
from tinkercloud.speculative.remote.trees import tree_of

LENGTH, SEED = 40, 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt_length", [1, 33, 300])
@pytest.mark.parametrize("branches", [1, 3])
def test_sessions_are_plain_samples(
    store: ModelStore, base: str, temperature: float, prompt_length: int, branches: int
) -> None:
    """Two sessions at once, chains and trees, some of them wrong; nothing is held afterwards."""
    engine = SamplingEngine(max_batch=64, kv_cache_bytes=2**30)
    worker = TargetWorker(
        TargetModel("tiny", b"", VOCAB), TargetEngine(store.version(base), engine)
    )
    connection = worker.open()
    worker.receive(connection, pb.ToTarget(hello=pb.Hello(protocol=PROTOCOL)))
    worker.step()
    assert connection.outgoing.get_nowait().welcome.model == "tiny"
    prompts = {number: random_prompt(prompt_length, number) for number in (1, 2)}
    plain = {}
    for number, prompt in prompts.items():
        request = ask(
            prompt, max_tokens=LENGTH, temperature=temperature, top_p=0.95, seed=SEED,
        )  # fmt: skip
        plain[number] = Sampler(store).one(base, request).sequences[0]
        params = draft_pb2.Params(seed=SEED, temperature=temperature, top_k=-1, top_p=0.95)
        worker.receive(connection, pb.ToTarget(open=pb.Open(id=number, params=params)))
    said: dict[int, list[int]] = {1: [], 2: []}
    logprobs: dict[int, list[float]] = {1: [], 2: []}
    rng = np.random.default_rng(0)
    left = set(prompts)
    cached = 0
    while left:
        for number in left:
            right = plain[number].tokens[len(said[number]) :][:6]
            chains = [_spoiled(right, rng) for _ in range(branches)]
            tokens, parents = tree_of(chains)
            first = [] if said[number] else prompts[number]
            message = pb.Verify(
                id=number, number=1, length=prompt_length + len(said[number]), tokens=first,
                drafted=tokens, parents=parents if branches > 1 else (), max_tokens=1,
            )  # fmt: skip
            worker.receive(connection, pb.ToTarget(verify=message))
        worker.step()
        while worker.step():
            pass
        for _ in tuple(left):
            verdict = connection.outgoing.get_nowait().verdict
            said[verdict.id] += verdict.tokens
            logprobs[verdict.id] += verdict.logprobs
            cached = max(cached, verdict.num_cached)
            if verdict.has_stopped or len(said[verdict.id]) >= len(plain[verdict.id].tokens):
                left.remove(verdict.id)
    for number, sample in plain.items():
        length = len(sample.tokens)
        assert said[number][:length] == sample.tokens.tolist()
        assert np.array_equal(np.array(logprobs[number], np.float32)[:length], sample.logprobs)
    assert cached > 0
    worker.receive(connection, None)
    worker.step()
    assert engine.num_kv_blocks_held == 0
    assert worker.stats()["sessions"] == 0


def _spoiled(right: np.ndarray, rng: np.random.Generator) -> list[int]:
    wrong = rng.random(len(right)) < 0.2
    return np.where(wrong, (right + 1) % 256, right).tolist()


def test_what_the_model_cannot_read_is_refused_with_the_numbers(
    store: ModelStore, base: str
) -> None:
    engine = TargetEngine(store.version(base), SamplingEngine(max_batch=4, kv_cache_bytes=2**28))
    worker = TargetWorker(TargetModel("tiny", b"", VOCAB), engine)
    connection = worker.open()
    params = draft_pb2.Params(seed=1, temperature=1.0, top_k=-1, top_p=1.0)
    verify = pb.Verify(id=1, number=1, length=1025, tokens=[1] * 1025, max_tokens=1)
    for message in (
        {"hello": pb.Hello(protocol=PROTOCOL)}, {"open": pb.Open(id=1, params=params)},
        {"verify": verify},
    ):  # fmt: skip
        worker.receive(connection, pb.ToTarget(**message))
    worker.step()
    connection.outgoing.get_nowait()
    assert connection.outgoing.get_nowait().failure.reason == "1026 tokens; the model reads 1024"
    assert worker.stats()["sessions"] == 0
