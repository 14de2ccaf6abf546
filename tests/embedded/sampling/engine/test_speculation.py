"""Samples with drafts are the samples without: tokens, log-probabilities, whatever drafts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import (
    LAWS,
    Drafting,
    all_same,
    knowing,
    mixture,
    named,
    untaught_head,
)
from tests.embedded.tiny import (
    VOCAB,
    Sampler,
    ask,
    random_prompt,
    same,
    tuned,
    write_tiny_model,
)
from tests.speculative.drafters.trial_drafters import DyingDrafter, GarbageDrafter, RandomDrafter
from tinkercloud.core.types import FromBase
from tinkercloud.decoding.sampler import RowParams, warp
from tinkercloud.embedded.draft_training.capture import SequenceMetadata, capture_sequence
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import scheduler
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.trace import Trace
from tinkercloud.speculative.draft_length.rounds import Reason, Round
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


# Every law in one size of batch, and in the others the one that draws most freely and the one that
# cuts most.
@pytest.mark.parametrize(
    ("batch", "temperature", "more"),
    [*((3, *law) for law in LAWS), *((size, *LAWS[i]) for size in (1, 8) for i in (2, 4))],
    ids=str,
)
def test_drafts_change_no_token_and_no_logprob(
    store: ModelStore, base: str, batch: int, temperature: float, more: dict[str, object]
) -> None:
    requests = mixture(base, batch, temperature, use_eos=False, **more)
    plain = Sampler(store, num_threads=2).run(requests)
    drafters: list[tuple[Callable[[int], Drafter], tuple[int, ...]]] = [
        (named("off"), (5,)),
        (named("suffix"), (1, 2, 5, 8)),
        (named("always-wrong"), (1, 8)),
        (named("random"), (1, 8)),
        (lambda _: knowing(plain, requests, 3), (1, 2, 5, 8)),
    ]
    for make, lengths in drafters:
        for most in lengths:
            drafting = Drafting(make, most)
            all_same(Sampler(store, num_threads=2, speculate=drafting).run(requests), plain)
    for most in (1, 2, 5, 8):
        drafting = Drafting(lambda _: knowing(plain, requests, 0), most)
        all_same(Sampler(store, num_threads=2, speculate=drafting).run(requests), plain)
        # samples of one prompt may begin alike
        num_verified = sum(each.num_verified for each in drafting.policy.rounds)
        assert drafting.policy.num_accepted > 0.9 * num_verified > 0


@pytest.mark.parametrize("chunk", [1, 7])
def test_drafts_during_chunked_prefill_change_nothing(
    store: ModelStore, base: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixture(base, 5, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    monkeypatch.setattr(scheduler, "CHUNK", chunk)
    drafting = Drafting(lambda _: knowing(plain, requests, 3), 5)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert drafting.policy.num_accepted > 0


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def model(folder: Path, dtype: torch.dtype, num_blocks: int = 400) -> Callable[[int], Drafter]:
    def make(_: int) -> ModelDrafter:
        base = BaseModel.load("draft", folder, folder, dtype, torch.device("cpu"))
        runner = NativeRunner(1)
        pool = BlockPool(base.config, dtype, base.device, num_blocks, runner.kv_layout(base))
        version = Version("draft", base, base.weights, None, 1.0)
        return ModelDrafter(version, runner, pool)

    return make


@pytest.mark.parametrize(("temperature", "more"), LAWS, ids=str)
def test_a_draft_model_draws_with_the_targets_noise(
    store: ModelStore, folder: Path, other_folder: Path, temperature: float, more: dict[str, object]
) -> None:
    """The target itself as its draft is always right; another model, and one without room, change
    nothing."""
    base = store.publish(FromBase("tiny"))
    requests = mixture(base, 5, temperature, use_eos=False, **more)
    plain = Sampler(store, num_threads=2).run(requests)
    dtype = store.base("tiny").dtype
    for make in (model(folder, dtype), model(other_folder, dtype), model(folder, dtype, 7)):
        for most in (1, 4, 8):
            drafting = Drafting(make, most)
            outputs = Sampler(store, num_threads=2, speculate=drafting).run(requests)
            all_same(outputs, plain)
    right = Drafting(model(folder, dtype), 4)
    all_same(Sampler(store, speculate=right).run(requests), plain)
    assert right.policy.num_accepted == sum(each.num_verified for each in right.policy.rounds) > 0


@pytest.mark.parametrize(("temperature", "more"), LAWS, ids=str)
@pytest.mark.parametrize("most", [1, 5])
def test_a_head_drafts_from_the_targets_hidden_states_and_changes_nothing(
    store: ModelStore, most: int, temperature: float, more: dict[str, object]
) -> None:
    base = store.publish(FromBase("tiny"))
    requests = mixture(base, 5, temperature, use_eos=False, **more)
    plain = Sampler(store, num_threads=2).run(requests)
    drafting = Drafting(lambda _: HeadDrafter(TorchHead(*untaught_head(store.base("tiny")))), most)
    sampler = Sampler(store, num_threads=2, speculate=drafting)
    all_same(sampler.run(requests), plain)
    snapshot = sampler.engine.speculation()[0]["tiny"]
    assert snapshot["refused"] == {}
    assert snapshot["drafters"]["head"]["depths"][0]["verified"] > 50


def test_a_heads_cache_equals_that_of_the_finished_text(store: ModelStore) -> None:
    """After rounds in which drafts fell: the next draft is that of a head that reads the text at
    once, with states from a pass over all of it."""
    base = store.publish(FromBase("tiny"))
    prompt = random_prompt(12, 1)
    request = ask(prompt, max_tokens=40, seed=3, use_eos=False)
    drafter, fresh = (HeadDrafter(TorchHead(*untaught_head(store.base("tiny")))) for _ in range(2))
    engine = Sampler(store, speculate=Drafting(lambda _: drafter, 3)).engine
    engine.submit(store.version(base), request, lambda output: None)
    for _ in range(12):
        engine.step()
    (sequence,) = engine.scheduler.running
    (state,) = engine.states
    assert state.speculation is not None
    stream = state.speculation._streams[sequence]
    (draft,) = drafter.propose([(stream, 3)])
    tokens = np.array(stream.tokens, np.int32)
    version = store.version(base)
    captured = capture_sequence(
        version, tokens, fresh.layers, len(prompt), SequenceMetadata(1.0, 0)
    )
    states = torch.from_numpy(captured.hidden)
    fresh.begin(stream)
    fresh.observe_hidden(stream, 0, states[:-1])
    (expected,) = fresh.propose([(stream, 3)])
    assert draft.tokens == expected.tokens
    np.testing.assert_allclose(draft.confidences, expected.confidences, atol=0.05)


def test_another_models_drafts_are_accepted_more_often_than_by_chance(
    store: ModelStore, base: str, folder: Path
) -> None:
    """One that was tuned a little, at temperature 1: the noise is shared. By chance it would be one
    in a hundred; how many more depends on what little the tuning was."""
    tuned_id = tuned(store, "m", 4)
    requests = {"0": (tuned_id, ask(random_prompt(20, 1), n=8, max_tokens=60, use_eos=False))}
    plain = Sampler(store).run(requests)
    drafting = Drafting(model(folder, store.base("tiny").dtype), 3)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    judged = sum(sum(each.num_judged) for each in drafting.policy.rounds)
    assert drafting.policy.num_accepted > 0.1 * judged
    assert drafting.policy.stops == [], "more than their probability says, as it must be"


def test_every_drafted_token_that_is_right_is_accepted(store: ModelStore, base: str) -> None:
    """30 tokens: one with the prompt, then a round for each 9."""
    requests = {"0": (base, ask(random_prompt(20, 1), max_tokens=30, seed=1, use_eos=False))}
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 0), 8)
    sampler = Sampler(store, speculate=drafting)
    all_same(sampler.run(requests), plain)
    assert [each.accepted for each in drafting.policy.rounds] == [(8,), (8,), (8,), (1,)]
    assert sampler.engine.num_tokens_sampled == 30


@pytest.mark.parametrize(("err_every", "are_right"), [(0, True), (1, False)])
@pytest.mark.parametrize("num_verified", [0, 2])
def test_what_was_drafted_in_place_of_the_targets_own_token_is_compared_with_it(
    store: ModelStore, base: str, num_verified: int, err_every: int, *, are_right: bool
) -> None:
    """Behind the verified tokens, where all of them were accepted, and where none was verified."""
    requests = {
        str(i): (base, ask(random_prompt(20, i), max_tokens=60, seed=i, use_eos=False))
        for i in range(4)
    }
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, err_every), 5)
    policy = drafting.policy
    policy.choose = lambda confidences: [min(num_verified, len(c)) for c in confidences]
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    places = [place for each in policy.rounds for place in _places(each)]
    compared = [foreseen for foreseen, is_compared in places if is_compared]
    assert len(compared) > 20 or (num_verified and not are_right)
    assert all(foreseen is are_right for foreseen in compared)
    assert all(foreseen is None for foreseen, is_compared in places if not is_compared)


def _places(last_round: Round) -> list[tuple[bool | None, bool]]:
    """Of each sample: what its round says, and whether there is something to say."""
    drafts = zip(
        last_round.foreseen, last_round.accepted, last_round.verified, last_round.confidences,
        strict=True,
    )  # fmt: skip
    return [(foreseen, a == v < len(c)) for foreseen, a, v, c in drafts]


@pytest.mark.parametrize("rank", [0, 4])
def test_drafts_change_nothing_of_a_tuned_model_in_a_mixed_batch(
    store: ModelStore, base: str, rank: int
) -> None:
    other = tuned(store, "m", rank)
    requests = dict(mixture(base, 4, 1.0, use_eos=False))
    requests |= {f"m{name}": (other, request) for name, (_, request) in requests.items()}
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), 4)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert drafting.policy.num_accepted > 0


def test_a_sample_ends_inside_a_draft_where_it_would_have_ended(
    store: ModelStore, base: str
) -> None:
    """At the end token, at a stop sequence, at max_tokens."""
    free = ask(random_prompt(20, 2), n=4, max_tokens=40, seed=5, use_eos=False)
    whole = Sampler(store).one(base, free)
    tokens = whole.sequences[0].tokens.tolist()
    decoder = store.base("tiny").decoder
    assert decoder is not None
    texts = [decoder.decode([token]) for token in tokens[8:]]
    for ended in (
        {"stop_token_ids": (tokens[17],)},
        {"stop_strings": (next(text for text in texts if text.isascii() and text),)},
        {"max_tokens": 13},
    ):
        request = replace(free, params=replace(free.params, **ended))
        requests = {"0": (base, request)}
        plain = Sampler(store).run(requests)
        lengths = [len(sequence.tokens) for sequence in plain["0"].sequences]
        assert min(lengths) < 40
        drafting = Drafting(lambda _: knowing({"0": whole}, {"0": (base, free)}, 0), 8)
        sampler = Sampler(store, speculate=drafting)
        all_same(sampler.run(requests), plain)
        (state,) = sampler.engine.states
        pool = state.cache.pool
        assert pool.num_available == pool.num_blocks


def test_keys_and_values_after_a_round_are_those_of_a_fresh_prefill(
    store: ModelStore, base: str
) -> None:
    """A second turn that begins with what was drafted and judged reuses its blocks."""
    requests = {"0": (base, ask(random_prompt(30, 3), max_tokens=60, seed=2, use_eos=False))}
    plain = Sampler(store).run(requests)
    for err_every in (0, 2, 3, 7):
        drafting = Drafting(lambda _, e=err_every: knowing(plain, requests, e), 6)
        sampler = Sampler(store, speculate=drafting)
        first = sampler.run(requests)
        all_same(first, plain)
        turn = [*requests["0"][1].prompt.tolist(), *first["0"].sequences[0].tokens.tolist(), 7, 8]
        second = ask(turn, max_tokens=10, seed=4, use_eos=False)
        output = sampler.one(base, second)
        assert output.prompt_cache_hit_tokens >= 80
        same(output, Sampler(store).one(base, second))


def test_no_block_is_kept_for_rejected_drafts(store: ModelStore, base: str) -> None:
    sampler = Sampler(store, speculate=Drafting(named("always-wrong"), 8))
    request = ask(random_prompt(10, 0), max_tokens=100, seed=1, use_eos=False)
    sampler.engine.submit(store.version(base), request, lambda output: None)
    while sampler.engine.busy:
        sampler.engine.step()
        for sequence in sampler.engine.scheduler.running:
            assert len(sequence.blocks) <= -(-len(sequence.tokens) // 16)
            assert sequence.num_computed == len(sequence.tokens) - 1


def test_pre_empted_samples_go_on_with_drafts(store: ModelStore, base: str) -> None:
    requests = {
        str(i): (base, ask(random_prompt(40 + i, i), n=2, seed=i, max_tokens=600, use_eos=False))
        for i in range(2)
    }
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 5), 8)
    tight = Sampler(store, kv_cache_bytes=1, speculate=drafting)  # room for 1024 tokens
    all_same(tight.run(requests), plain)
    assert tight.engine.num_preempted > 0
    assert drafting.policy.num_accepted > 500


@pytest.mark.parametrize("num_good", [0, 1, 5])
def test_a_drafter_that_dies_costs_nothing_but_drafts(
    store: ModelStore, base: str, num_good: int
) -> None:
    requests = mixture(base, 3, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    for drafting in (
        Drafting(lambda v: DyingDrafter(RandomDrafter(v), num_good), 4),
        Drafting(lambda v: GarbageDrafter(v), 4),
    ):
        all_same(Sampler(store, speculate=drafting).run(requests), plain)


def test_earlier_samples_of_a_prompt_are_drafted_from(store: ModelStore, base: str) -> None:
    """The suffix drafter, a second time over greedy samples: nearly all of them stands."""
    requests = mixture(base, 3, 0.0, use_eos=False)
    plain = Sampler(store).run(requests)
    drafting = Drafting(named("suffix"), 6)
    sampler = Sampler(store, speculate=drafting)
    all_same(sampler.run(requests), plain)
    before = len(drafting.policy.rounds)
    all_same(sampler.run(requests), plain)
    rounds = drafting.policy.rounds[before:]
    num_verified = sum(sum(each.verified) for each in rounds)
    assert sum(sum(each.accepted) for each in rounds) > 0.7 * num_verified


def test_a_trace_has_a_line_for_each_verified_draft(
    store: ModelStore, base: str, tmp_path: Path
) -> None:
    requests = {"0": (base, ask(random_prompt(20, 1), max_tokens=30, seed=1, use_eos=False))}
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), 5)
    path = tmp_path / "trace" / "rounds.jsonl"

    def traced(*args: object) -> Speculation:
        drafter = GuardedDrafter(knowing(plain, requests, 4), 260)
        return Speculation(drafter, drafting.policy, Trace(path))

    Sampler(store, speculate=traced).run(requests)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tokens = [*requests["0"][1].prompt.tolist(), *plain["0"].sequences[0].tokens.tolist()]
    assert lines
    for line in lines:
        at, judged = line["position"], min(len(line["drafted"]), line["accepted"] + 1)
        assert line["target"] == tokens[at : at + judged]
        assert line["drafted"][: line["accepted"]] == line["target"][: line["accepted"]]


def test_acceptance_is_what_the_targets_distribution_predicts(store: ModelStore, base: str) -> None:
    """T4: random tokens and an honest suffix drafter raise no alarm; z is small."""
    for name in ("random", "suffix"):
        drafting = Drafting(named(name), 4)
        sampler = Sampler(store, speculate=drafting)
        for seed in range(6):
            prompt = random_prompt(12, seed % 3)
            sampler.one(base, ask(prompt, n=8, max_tokens=60, seed=100 + seed, use_eos=False))
        assert drafting.speculation is not None
        snapshot = drafting.speculation.snapshot()["drafters"][name]
        assert snapshot["calibration_tokens"] > 200
        assert abs(snapshot["calibration_z"]) < 4
        assert np.isfinite(snapshot["calibration_z"])


def test_a_repeated_draw_raises_no_alarm(store: ModelStore, base: str) -> None:
    """Its own text of last time is always accepted, more often than the distribution predicts."""
    drafting = Drafting(named("suffix"), 6)
    sampler = Sampler(store, speculate=drafting)
    request = ask(random_prompt(12, 1), n=4, max_tokens=60, seed=3, use_eos=False)
    for _ in range(4):
        sampler.one(base, request)
    assert drafting.policy.num_accepted > 400
    assert drafting.policy.stops == []


def test_a_drafter_that_knows_what_the_target_will_draw_raises_the_alarm(
    store: ModelStore, base: str
) -> None:
    """Acceptance above what the distribution predicts means that the drafter knows the noise."""
    requests = mixture(base, 8, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 0), 8)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert Reason.ALARM in drafting.policy.stops


@pytest.mark.parametrize(("temperature", "more"), LAWS[1:], ids=str)
def test_log_probabilities_are_those_of_the_finished_text(
    store: ModelStore, base: str, temperature: float, more: dict[str, object]
) -> None:
    """T6: of the distribution that was drawn from, computed from the scored text. In bfloat16 that
    is scored as transformers computes it: the tolerance is its own distance from exact."""
    requests = mixture(base, 3, temperature, use_eos=False, **more)
    distances = []
    plain = Sampler(store).run(requests)
    drafting = Drafting(lambda _: knowing(plain, requests, 4), 5)
    outputs = Sampler(store, speculate=drafting).run(requests)
    for name, (_, request) in requests.items():
        prompt = request.prompt.tolist()
        for sampled in outputs[name].sequences:
            whole = [*prompt, *sampled.tokens.tolist()]
            scored = Sampler(store).one(base, ask(whole, max_tokens=1, topk_prompt_logprobs=VOCAB))
            topk = scored.topk_prompt_logprobs
            assert topk is not None
            ids, values = topk.token_ids, topk.logprobs
            for i, logprob in enumerate(sampled.logprobs):
                order = np.argsort(ids[len(prompt) + i])
                logits = torch.from_numpy(values[len(prompt) + i][order])[None]
                row = RowParams(request.params, 0, 0)
                expected = torch.log_softmax(warp(logits, [row]).double(), -1)[0]
                distances.append(abs(float(expected[sampled.tokens[i]]) - logprob))
    if store.base("tiny").dtype == torch.float32:
        assert max(distances) < 1e-4
    else:
        assert np.mean(distances) < 2e-2
