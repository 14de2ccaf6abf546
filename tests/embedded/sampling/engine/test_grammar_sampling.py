"""Grammars through the whole engine: what they allow, what they cost others, and how they fail."""

import json
import threading
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from tests.embedded.speculative_engine import Drafting, all_same, knowing, mixture
from tests.embedded.tiny import EOS, VOCAB, Sampler, ask, random_prompt, same
from tinkercloud.core.types import Grammar, SampledSequence, SampleOutput, SampleRequest
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import grammar_queue
from tinkercloud.errors import UserError
from tinkercloud.grammar import compiler as grammar_compiler

PROMPT = random_prompt(20, 0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


def structured(seed: int = 0, **more: object) -> SampleRequest:
    return ask(PROMPT, **({"n": 2, "max_tokens": 300, "seed": seed, "grammar": GRAMMAR} | more))


def text_of(sequence: SampledSequence) -> str:
    """Without the end-of-sequence token."""
    ids = [int(token) for token in sequence.tokens if token < EOS]
    alphabet = byte_order()
    return bytes(alphabet[i] for i in ids).decode(errors="replace")


def byte_order() -> list[int]:
    """The byte of each token of the tiny model."""
    from tokenizers import pre_tokenizers

    from tinkercloud.weights.token_bytes import _BYTES

    return [_BYTES[letter] for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("use_eos", [True, False])
def test_what_ends_by_itself_validates_at_any_temperature(
    store: ModelStore, base: str, temperature: float, use_eos: bool
) -> None:
    requests = {
        str(seed): (base, structured(seed, temperature=temperature, use_eos=use_eos))
        for seed in range(3)
    } | {"short": (base, structured(9, max_tokens=3))}
    outputs = Sampler(store).run(requests)
    assert [s.stop_reason for s in outputs.pop("short").sequences] == ["length", "length"]
    reasons = []
    for output in outputs.values():
        for sequence in output.sequences:
            reasons.append(sequence.stop_reason)
            if sequence.stop_reason == "stop":
                assert sequence.tokens[-1] == EOS
                jsonschema.validate(json.loads(text_of(sequence)), SCHEMA)
    assert temperature == 0 or "stop" in reasons


def test_logprobs_are_those_of_the_masked_distribution(store: ModelStore, base: str) -> None:
    request = structured(1, temperature=1.3, topk_sample_logprobs=VOCAB)
    for sequence in Sampler(store).one(base, request).sequences:
        assert sequence.topk is not None
        rows = zip(sequence.tokens, sequence.logprobs, *_rows(sequence), strict=True)
        for token, logprob, ids, logprobs in rows:
            assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-4)
            assert logprobs[ids == token].max() == pytest.approx(logprob, abs=1e-5)
        first = sequence.topk.logprobs[0] > -9999
        assert first.sum() == 1, "a text begins with {"
        assert sequence.logprobs[0] == 0.0


def _rows(sequence: SampledSequence) -> tuple[np.ndarray, np.ndarray]:
    assert sequence.topk is not None
    return sequence.topk.token_ids, sequence.topk.logprobs


def test_company_drafts_and_pre_emption_change_nothing(store: ModelStore, base: str) -> None:
    requests = dict(mixture(base, 3, 1.0, use_eos=False))
    requests["long"] = base, ask(random_prompt(400, 7), n=2, max_tokens=500, use_eos=False)
    requests["json"] = base, structured(5, n=4)
    alone = {name: Sampler(store).one(*request) for name, request in requests.items()}
    drafting = Drafting(lambda _: knowing(alone, requests, 4), 4)
    all_same(Sampler(store, speculate=drafting).run(requests), alone)
    tight = Sampler(store, kv_cache_bytes=1)
    all_same(tight.run(requests), alone)
    assert tight.engine.num_preempted > 0


def test_a_sample_that_starts_over_begins_its_grammar_anew(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pre-empted one does without the compiled pass."""
    monkeypatch.setattr(runners, "library", lambda: None)
    request = structured(3, n=1)
    undisturbed = Sampler(store).one(base, request)
    sampler = Sampler(store)
    outputs: list[SampleOutput] = []
    sampler.engine.submit(store.version(base), request, outputs.append)
    while not (running := sampler.engine.scheduler.running) or len(running[0].logprobs) < 20:
        sampler.engine.step()
    sampler.engine.scheduler._blocks.preempt(running[0])
    assert sampler.engine.scheduler.num_discarded == 20
    while sampler.engine.busy:
        sampler.engine.step()
    same(outputs[0], undisturbed)


def test_the_samples_of_others_keep_their_bits(store: ModelStore, base: str) -> None:
    plain = ask(PROMPT, n=3, max_tokens=60, seed=5, use_eos=False)
    outputs = Sampler(store).run({"json": (base, structured(1)), "plain": (base, plain)})
    same(outputs["plain"], Sampler(store).one(base, plain))


# ---- refusals, and what they leave


def run_beside(store: ModelStore, base: str, doomed: SampleRequest) -> tuple[Sampler, object]:
    """The outcome of a request beside another, which must not notice it."""
    plain = ask(PROMPT, n=2, max_tokens=40, seed=5, use_eos=False)
    sampler = Sampler(store)
    outputs = sampler.run({"doomed": (base, doomed), "plain": (base, plain)})
    same(outputs["plain"], Sampler(store).one(base, plain))
    (state,) = sampler.engine.states
    assert state.cache.pool.num_available == state.cache.pool.num_blocks
    assert (sampler.engine.num_running, sampler.engine.num_waiting) == (0, 0)
    return sampler, outputs["doomed"]


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "(("), Grammar("json_schema", '{"$ref": "#"}')], ids=str
)
def test_a_grammar_that_cannot_be_used_fails_its_request_alone(
    store: ModelStore, base: str, grammar: Grammar
) -> None:
    _, outcome = run_beside(store, base, structured(grammar=grammar))
    assert isinstance(outcome, UserError)


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []

    def mask_of(*args: object) -> np.ndarray:
        masks.append(args)
        if len(masks) == 12:
            raise UserError("the grammar cannot be used: too many items")
        return original(*args)

    original = grammar_compiler.mask_of
    monkeypatch.setattr(grammar_compiler, "mask_of", mask_of)
    _, outcome = run_beside(store, base, structured(n=3))
    assert isinstance(outcome, UserError)
    assert "too many items" in str(outcome)


def test_a_slow_compilation_keeps_nobody_waiting_and_has_a_limit(
    store: ModelStore, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end before both are answered; the limit is reached when the other one is."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(grammar_queue, "time", clock)
    released = threading.Event()
    compile_now = grammar_compiler.GrammarCompiler.compile

    def compile_late(
        self: grammar_compiler.GrammarCompiler, grammar: Grammar
    ) -> grammar_compiler.CompiledGrammar:
        released.wait()
        return compile_now(self, grammar)

    monkeypatch.setattr(grammar_compiler.GrammarCompiler, "compile", compile_late)
    sampler = Sampler(store)
    outcomes: dict[str, SampleOutput | BaseException] = {}
    requests = {"slow": structured(), "plain": ask(PROMPT, max_tokens=3, use_eos=False)}
    for name, request in requests.items():
        sampler.engine.submit(
            *(store.version(base), request),
            lambda outcome, name=name: outcomes.__setitem__(name, outcome),
        )
    try:
        while "plain" not in outcomes:
            sampler.engine.step()
        assert "slow" not in outcomes
        clock.monotonic = lambda: grammar_queue.COMPILE_LIMIT_S + 0.1
        while sampler.engine.busy:
            sampler.engine.step()
    finally:
        released.set()
    assert f"within {grammar_queue.COMPILE_LIMIT_S:g} s" in str(outcomes["slow"])


def test_a_request_is_cancelled_while_its_grammar_is_compiled(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    outcomes: list[object] = []
    job = sampler.engine.submit(store.version(base), structured(), outcomes.append)
    assert sampler.engine.num_waiting == 1
    sampler.engine.cancel(job)
    assert not sampler.engine.busy
    assert len(outcomes) == 1
