"""Tokens as they are drawn, and samples that are cancelled: both leave every bit as it is."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pytest

from tests.embedded.speculative_engine import Drafting, all_same, knowing, mixture
from tests.embedded.tiny import Sampler, ask, random_prompt, same
from tinkercloud.core.types import SampledSequence, SampleOutput, SampleRequest, TokenChunk
from tinkercloud.decoding.sampler import Drawn
from tinkercloud.decoding.sampler import sample as draw
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import postprocessor

Requests = Mapping[str, tuple[str, SampleRequest]]


class Streams:
    """The chunks of several requests, and how much of them there was when each was answered."""

    def __init__(self, sampler: Sampler, requests: Requests):
        self.sampler = sampler
        self.chunks: dict[str, list[TokenChunk]] = defaultdict(list)
        self.outputs: dict[str, SampleOutput] = {}
        self.late: list[str] = []
        self.jobs = {}
        for name, (version, request) in requests.items():
            self.jobs[name] = sampler.engine.submit(
                *(sampler.store.version(version), request),
                lambda output, name=name: self.outputs.__setitem__(name, output),
                lambda chunk, name=name: self._take(name, chunk),
            )

    def _take(self, name: str, chunk: TokenChunk) -> None:
        self.chunks[name].append(chunk)
        if name in self.outputs:
            self.late.append(name)

    def step(self, num_steps: int | None = None) -> None:
        while self.sampler.engine.busy and num_steps != 0:
            self.sampler.engine.step()
            num_steps = None if num_steps is None else num_steps - 1

    def run(self) -> "Streams":
        self.step()
        return self

    def assert_equal_to(self, expected: Mapping[str, SampleOutput]) -> None:
        """Every sample's chunks, in order, are that sample."""
        assert self.late == []
        all_same(self.outputs, expected)
        for name, output in expected.items():
            for index, sequence in enumerate(output.sequences):
                assert_is([c for c in self.chunks[name] if c.sample_index == index], sequence)


def assert_is(chunks: list[TokenChunk], sequence: SampledSequence) -> None:
    assert all(len(chunk.tokens) for chunk in chunks)
    assert np.array_equal(np.concatenate([c.tokens for c in chunks]), sequence.tokens)
    assert np.array_equal(np.concatenate([c.logprobs for c in chunks]), sequence.logprobs)
    assert [c.stop_reason for c in chunks] == [None] * (len(chunks) - 1) + [sequence.stop_reason]
    if sequence.topk is not None:
        ids = np.concatenate([c.topk.token_ids for c in chunks])
        assert np.array_equal(ids, sequence.topk.token_ids)
        logprobs = np.concatenate([c.topk.logprobs for c in chunks])
        assert np.array_equal(logprobs, sequence.topk.logprobs)


def test_the_chunks_of_a_sample_are_that_sample(store: ModelStore, base: str) -> None:
    """Among them one that ends with a stop string, and k best tokens."""
    requests = dict(mixture(base, 5, 1.0))
    plain = Sampler(store).one(base, ask(random_prompt(9, 9), n=3, max_tokens=40, seed=4))
    stop = bytes(plain.sequences[0].tokens[10:12].tolist()).decode("latin-1")
    requests["topk"] = base, ask(random_prompt(9, 9), n=3, seed=4, topk_sample_logprobs=4)
    requests["stop"] = base, ask(random_prompt(9, 9), n=3, max_tokens=40, stop_strings=(stop,))
    expected = Sampler(store).run(requests)
    streams = Streams(Sampler(store), requests).run()
    streams.assert_equal_to(expected)
    # A token for each step: nothing is held back.
    assert all(len(c.tokens) == 1 for chunks in streams.chunks.values() for c in chunks)


def test_the_first_chunk_comes_with_the_first_token(store: ModelStore, base: str) -> None:
    requests = {"0": (base, ask(random_prompt(9, 1), n=2, max_tokens=50, use_eos=False))}
    streams = Streams(Sampler(store), requests)
    streams.step(1)
    assert [len(c.tokens) for c in streams.chunks["0"]] == [1, 1]
    streams.step(5)
    assert len(streams.chunks["0"]) == 12
    assert streams.outputs == {}


@pytest.mark.parametrize("most", [1, 5])
def test_accepted_drafts_come_in_one_chunk_and_change_nothing(
    store: ModelStore, base: str, most: int
) -> None:
    requests = mixture(base, 5, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), most)
    streams = Streams(Sampler(store, speculate=drafting), requests).run()
    streams.assert_equal_to(plain)
    assert max(len(c.tokens) for chunks in streams.chunks.values() for c in chunks) > 1


def tight_requests(base: str) -> Requests:
    return {
        str(i): (
            base,
            ask(
                random_prompt(40 + i, i), n=2, seed=i, max_tokens=400, use_eos=False,
                topk_sample_logprobs=2,
            ),
        )
        for i in range(2)
    }  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("drafts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pre_empted_sample_is_streamed_once(
    store: ModelStore, base: str, compiled: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one sequence of 1024 tokens. Without the compiled pass a sample starts over."""
    requests = tight_requests(base)
    plain = Sampler(store).run(requests)
    if not compiled:
        monkeypatch.setattr(runners, "library", lambda: None)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), 3) if drafts else None
    tight = Sampler(store, kv_cache_bytes=1, speculate=drafting)
    streams = Streams(tight, requests).run()
    streams.assert_equal_to(plain if compiled else streams.outputs)
    assert tight.engine.num_preempted > 0
    assert compiled or tight.engine.scheduler.num_discarded > 0


def test_a_sample_that_starts_over_keeps_what_its_stream_has(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other rounding draws other tokens the second time, as on a GPU: here all differ."""
    monkeypatch.setattr(runners, "library", lambda: None)
    tight = Sampler(store, kv_cache_bytes=1)
    scheduler = tight.engine.scheduler

    def other_draw(*args: object) -> Drawn:
        drawn = draw(*args)
        return drawn if not scheduler.num_discarded else _moved(drawn)

    monkeypatch.setattr(postprocessor, "sample", other_draw)
    requests = tight_requests(base)
    streams = Streams(tight, requests).run()
    assert scheduler.num_discarded > 0
    streams.assert_equal_to(streams.outputs)


def _moved(drawn: Drawn) -> Drawn:
    tokens = (drawn.tokens + 1) % 256
    return Drawn(tokens, drawn.logprobs - 1, drawn.norms, drawn.logits, drawn.rows)


# ---- cancelling


@pytest.mark.parametrize("num_steps", [0, 1, 2, 20])
def test_a_cancelled_request_leaves_no_trace(store: ModelStore, base: str, num_steps: int) -> None:
    """While it waits, while its prompt is computed, and while it runs, with several samples."""
    requests = dict(mixture(base, 4, 1.0, use_eos=False))
    plain = Sampler(store).run(requests)
    requests["doomed"] = base, ask(random_prompt(700, 99), n=3, max_tokens=300, use_eos=False)
    streams = Streams(Sampler(store), requests)
    engine = streams.sampler.engine
    streams.step(num_steps)
    engine.cancel(streams.jobs["doomed"])
    num_chunks = len(streams.chunks.pop("doomed", []))
    assert "cancelled" in str(streams.outputs.pop("doomed"))
    streams.step()
    assert num_chunks == 0 or num_steps > 1
    assert "doomed" not in streams.chunks
    streams.assert_equal_to(plain)
    (state,) = engine.states
    assert state.cache.pool.num_available == state.cache.pool.num_blocks
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_cancelling_under_drafts_and_pre_emption_leaves_others_as_they_were(
    store: ModelStore, base: str
) -> None:
    requests = dict(tight_requests(base))
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), 3)
    requests["doomed"] = base, ask(random_prompt(50, 99), n=2, max_tokens=600, use_eos=False)
    streams = Streams(Sampler(store, kv_cache_bytes=1, speculate=drafting), requests)
    engine = streams.sampler.engine
    while not engine.num_preempted:
        engine.step()
    engine.cancel(streams.jobs["doomed"])
    del streams.outputs["doomed"]
    streams.chunks.pop("doomed", None)
    streams.step()
    streams.assert_equal_to(plain)
    (state,) = engine.states
    assert state.cache.pool.num_available == state.cache.pool.num_blocks
    assert state.speculation is not None
    assert state.speculation._streams == {}


def test_the_last_request_that_is_cancelled_leaves_an_idle_engine(
    store: ModelStore, base: str
) -> None:
    requests = {"0": (base, ask(random_prompt(20, 1), n=2, max_tokens=300, use_eos=False))}
    streams = Streams(Sampler(store), requests)
    streams.step(3)
    streams.sampler.engine.cancel(streams.jobs["0"])
    assert not streams.sampler.engine.busy
    again = Sampler(store).one(*requests["0"])
    same(streams.sampler.one(*requests["0"]), again)
