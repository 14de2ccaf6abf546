"""The sampling engine against transformers and a slow reference, on a tiny random Llama."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.numerics.tiny import (
    EOS,
    VOCAB,
    Sampler,
    ask,
    random_prompt,
    reference,
    supervised,
    train,
)
from tinkercloud.core.types import AdamParams, FromBase, FromModel, LoraSpec
from tinkercloud.decoding.sampler import (
    RowParams,
    gumbel_noise,
    keep_mask,
    lowest_argmax,
    sample,
)
from tinkercloud.embedded import engine as engine_module
from tinkercloud.embedded.models import ModelStore
from tinkercloud.errors import VersionLost


@pytest.fixture
def base(store: ModelStore) -> str:
    return store.publish(FromBase("tiny"))


PROMPT = random_prompt(20, 0)


def logits_after(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double()


def law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The sampled distribution, written as the definition reads (float64 probabilities)."""
    probs = torch.softmax(logits / temperature, -1)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    if top_k > 0:
        order = order[:top_k]
    mass = sum(float(probs[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += float(probs[i]) / mass
        if reached >= top_p:
            break
    out = torch.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def test_greedy_equals_transformers_generate(store: ModelStore, base: str, folder: Path) -> None:
    model = reference(folder)
    theirs = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0,
    )[0, len(PROMPT):]  # fmt: skip
    ours = Sampler(store).one(base, ask(PROMPT, max_tokens=40, temperature=0.0, use_eos=False))
    assert ours.sequences[0].tokens.tolist() == theirs.tolist()
    plain = torch.log_softmax(logits_after(model, PROMPT), -1)
    assert ours.sequences[0].logprobs[0] == pytest.approx(float(plain[theirs[0]]), abs=1e-4)


@pytest.mark.parametrize(
    "warping",
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.3, 7, 1.0), (1.0, -1, 0.8), (0.9, 20, 0.5), (1.0, 1, 1.0)],
)
def test_sampling_equals_the_slow_reference(
    store: ModelStore, base: str, folder: Path, warping: tuple[float, int, float]
) -> None:
    temperature, top_k, top_p = warping
    model = reference(folder)
    request = ask(
        PROMPT, n=2, max_tokens=12, temperature=temperature, top_k=top_k, top_p=top_p, seed=11,
        use_eos=False,
    )  # fmt: skip
    output = Sampler(store).one(base, request)
    for index, sequence in enumerate(output.sequences):
        tokens = list(PROMPT)
        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
            probs = law(logits_after(model, tokens), temperature, top_k, top_p)
            noise = gumbel_noise(11, index, len(tokens), VOCAB)
            assert int(token) == int((probs.log() + noise).argmax())
            assert logprob == pytest.approx(float(probs[token].log()), abs=2e-4)
            tokens.append(int(token))


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others(
    store: ModelStore, base: str
) -> None:
    store.create_model("lora", "tiny", LoraSpec(rank=4, seed=1))
    store.create_model("full", "tiny", LoraSpec(rank=0, seed=1))
    for model_id in ("lora", "full"):
        train(store, model_id, [supervised(20, 1)])
        store.optim_step(model_id, AdamParams(learning_rate=0.01))
    versions = [base, store.publish(FromModel("lora")), store.publish(FromModel("full"))]
    wanted = {
        f"wanted {i}": (v, ask(PROMPT, n=2, max_tokens=150, seed=5, use_eos=False))
        for i, v in enumerate(versions)
    }
    alone = {name: Sampler(store).one(*request) for name, request in wanted.items()}
    rng = np.random.default_rng(3)
    others = {
        str(i): (
            versions[i % 3],
            ask(random_prompt(int(rng.integers(1, 300)), i), n=1 + i % 3, seed=i,
                max_tokens=int(rng.integers(1, 200))),
        )
        for i in range(16)
    }  # fmt: skip
    among = Sampler(store).run(others | wanted)
    for name, output in alone.items():
        for a, b in zip(output.sequences, among[name].sequences, strict=True):
            assert np.array_equal(a.tokens, b.tokens), name
            assert np.array_equal(a.logprobs, b.logprobs), name


def test_a_sample_depends_on_its_index_not_on_how_many_were_asked(
    store: ModelStore, base: str
) -> None:
    few = Sampler(store).one(base, ask(PROMPT, n=2, seed=9, use_eos=False))
    many = Sampler(store).one(base, ask(PROMPT, n=5, seed=9, use_eos=False))
    texts = [s.tokens.tolist() for s in many.sequences]
    assert texts[:2] == [s.tokens.tolist() for s in few.sequences]
    assert len({tuple(t) for t in texts}) == 5


@pytest.mark.parametrize("limits", [{"max_batch": 2}, {"kv_cache_bytes": 1}])
def test_tight_limits_change_nothing_but_time(
    store: ModelStore, base: str, limits: dict[str, int]
) -> None:
    requests = {
        str(i): (base, ask(random_prompt(5 + 9 * i, i), n=3, seed=i, max_tokens=20 + i))
        for i in range(4)
    }
    wide, tight = Sampler(store).run(requests), Sampler(store, **limits).run(requests)
    for name, output in wide.items():
        for a, b in zip(output.sequences, tight[name].sequences, strict=True):
            assert np.array_equal(a.tokens, b.tokens)
            assert np.array_equal(a.logprobs, b.logprobs)


def test_a_prompt_seen_before_is_not_computed_again(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    request = ask(PROMPT, max_tokens=30, seed=4, use_eos=False)
    first, second = sampler.one(base, request), sampler.one(base, request)
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, len(PROMPT))
    assert np.array_equal(first.sequences[0].logprobs, second.sequences[0].logprobs)


def test_a_prompt_of_several_chunks_scores_as_transformers_does(
    store: ModelStore, base: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 32)
    monkeypatch.setattr(engine_module, "PREFILL_BUDGET", 64)
    prompts = {str(n): random_prompt(n, n) for n in (1, 2, 31, 32, 33, 100, 257)}
    requests = {k: (base, ask(p, max_tokens=2, prompt_logprobs=True)) for k, p in prompts.items()}
    for name, output in Sampler(store).run(requests).items():
        prompt = prompts[name]
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(folder)(torch.tensor([prompt])).logits[0], -1)
        expected = logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
        assert output.prompt_logprobs.shape == (len(prompt),)
        assert np.isnan(output.prompt_logprobs[0])
        np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=1e-4)


def test_last_n_scores_only_the_last_tokens(store: ModelStore, base: str) -> None:
    whole = Sampler(store).one(base, ask(PROMPT, max_tokens=1, prompt_logprobs=True))
    last = Sampler(store).one(
        base, ask(PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=3,
                  topk_prompt_logprobs=2),
    )  # fmt: skip
    assert np.isnan(last.prompt_logprobs[:-3]).all()
    np.testing.assert_allclose(last.prompt_logprobs[-3:], whole.prompt_logprobs[-3:], atol=1e-5)
    assert (last.topk_prompt_logprobs.logprobs[:-3] == -99999.0).all()
    assert np.isfinite(last.topk_prompt_logprobs.logprobs[-3:]).all()
    assert (last.topk_prompt_logprobs.logprobs[-3:] > -1000).all()


def test_topk_and_target_prompt_logprobs_agree_with_the_full_distribution(
    store: ModelStore, base: str, folder: Path
) -> None:
    targets = np.full((len(PROMPT) - 1, 3), -1, np.int64)
    targets[4] = [7, -1, 200]
    targets[18] = [0, 259, -1]
    request = ask(PROMPT, max_tokens=1, topk_prompt_logprobs=4, target_prompt_logprobs=targets)
    output = Sampler(store).one(base, request)
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(folder)(torch.tensor([PROMPT])).logits[0], -1)
    best = logprobs[:-1].topk(4)
    np.testing.assert_array_equal(output.topk_prompt_logprobs.token_ids[1:], best.indices)
    np.testing.assert_allclose(output.topk_prompt_logprobs.logprobs[1:], best.values, atol=1e-4)
    assert (output.topk_prompt_logprobs.token_ids[0] == 0).all()
    expected = np.zeros(targets.shape, np.float32)
    for row, column in zip(*np.nonzero(targets >= 0), strict=True):
        expected[row, column] = logprobs[row, targets[row, column]]
    np.testing.assert_allclose(output.target_prompt_logprobs, expected, atol=1e-4)
    assert output.prompt_logprobs is None


def test_topk_of_sampled_tokens_is_of_the_law_sampled_from(store: ModelStore, base: str) -> None:
    request = ask(PROMPT, max_tokens=5, top_k=3, temperature=0.8, topk_sample_logprobs=5,
                  use_eos=False)  # fmt: skip
    sequence = Sampler(store).one(base, request).sequences[0]
    assert sequence.topk.token_ids.shape == (5, 5)
    assert (sequence.topk.logprobs[:, 3:] == -99999.0).all()
    np.testing.assert_allclose(np.exp(sequence.topk.logprobs[:, :3]).sum(1), 1.0, atol=1e-5)
    for row, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
        place = sequence.topk.token_ids[row].tolist().index(token)
        assert sequence.topk.logprobs[row, place] == logprob


# ---- where a sample ends


def greedy_tokens(store: ModelStore, base: str, number: int) -> list[int]:
    request = ask(PROMPT, max_tokens=number, temperature=0.0, use_eos=False)
    return Sampler(store).one(base, request).sequences[0].tokens.tolist()


def test_a_stop_token_ends_the_sample_and_is_part_of_it(store: ModelStore, base: str) -> None:
    tokens = greedy_tokens(store, base, 10)
    request = ask(PROMPT, max_tokens=10, temperature=0.0, stop_token_ids=(tokens[4],))
    sequence = Sampler(store).one(base, request).sequences[0]
    assert sequence.tokens.tolist() == tokens[: tokens.index(tokens[4]) + 1]
    assert sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_a_stop_string_across_tokens_ends_the_sample(store: ModelStore, base: str) -> None:
    tokens = greedy_tokens(store, base, 40)
    decode = store.base("tiny").decoder.decode
    text = decode(tokens)
    for start in range(3, 30):
        stop = decode(tokens[start : start + 3])
        if "\ufffd" not in stop and text.find(stop) == len(decode(tokens[:start])):
            break
    else:
        pytest.fail("the greedy text has no three clean characters in a row")
    request = ask(PROMPT, max_tokens=40, temperature=0.0, stop_strings=(stop,), use_eos=False)
    sequence = Sampler(store).one(base, request).sequences[0]
    assert sequence.tokens.tolist() == tokens[: start + 3]
    assert sequence.stop_reason == "stop"


def test_end_of_sequence_ends_a_sample_unless_stopping_is_off(
    store: ModelStore, base: str, folder: Path
) -> None:
    eager = store.base("tiny").weights["lm_head"]
    saved = eager[EOS].clone()
    try:
        eager[EOS] = eager[greedy_tokens(store, base, 1)[0]] * 1.5
        fresh = Sampler(store).one(base, ask(PROMPT, max_tokens=6, temperature=0.0))
        never = Sampler(store).one(base, ask(PROMPT, max_tokens=6, temperature=0.0, use_eos=False))
    finally:
        eager[EOS] = saved
    assert (fresh.sequences[0].tokens.tolist(), fresh.sequences[0].stop_reason) == ([EOS], "stop")
    assert len(never.sequences[0].tokens) == 6
    assert never.sequences[0].stop_reason == "length"


def test_without_max_tokens_a_sample_runs_to_the_context_limit(
    store: ModelStore, base: str
) -> None:
    prompt = random_prompt(1000, 2)
    sequence = Sampler(store).one(base, ask(prompt, max_tokens=None, use_eos=False)).sequences[0]
    assert len(sequence.tokens) == 1024 - 1000
    assert sequence.stop_reason == "length"


def test_a_released_version_is_lost_and_its_prompts_are_forgotten(
    store: ModelStore, base: str
) -> None:
    sampler = Sampler(store)
    sampler.one(base, ask(PROMPT))
    assert sampler.engine._prompt_cache
    sampler.engine.forget(base)
    store.release(base)
    assert not sampler.engine._prompt_cache
    with pytest.raises(VersionLost):
        store.version(base)


def test_a_failed_step_answers_every_request(store: ModelStore, base: str) -> None:
    sampler = Sampler(store)
    outcomes: list[object] = []
    for i in range(3):
        sampler.engine.submit(store.version(base), ask(PROMPT, seed=i), outcomes.append)
    sampler.engine.step()
    sampler.engine.submit(store.version(base), ask(PROMPT), outcomes.append)
    sampler.engine.fail_all(RuntimeError("broken"))
    assert [type(o) for o in outcomes] == [RuntimeError] * 4
    assert not sampler.engine.busy


# ---- the sampler's pure functions


def test_sampled_frequencies_follow_the_law() -> None:
    """Chi-square over 20,000 independent keys; the 99.99 % point of 9 degrees is 33.7."""
    logits = torch.linspace(-2, 2, 10)
    rows = [RowParams(0.8, -1, 1.0, s % 7, s // 7 % 50, s // 350) for s in range(20_000)]
    drawn = sample(logits.expand(len(rows), -1), rows)
    expected = torch.softmax(logits.double() / 0.8, -1) * len(rows)
    counts = torch.bincount(drawn.tokens, minlength=10).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 33.7


def test_noise_is_standard_gumbel_and_independent_between_keys() -> None:
    noise = gumbel_noise(1, 0, 0, 200_000)
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.03)
    for other in (gumbel_noise(2, 0, 0, 200_000), gumbel_noise(1, 1, 0, 200_000),
                  gumbel_noise(1, 0, 1, 200_000)):  # fmt: skip
        assert abs(float(np.corrcoef(noise, other)[0, 1])) < 0.01
    assert torch.equal(noise[:1000], gumbel_noise(1, 0, 0, 1000))


def test_noise_takes_seeds_of_the_whole_range() -> None:
    assert torch.isfinite(gumbel_noise(2**64 - 1, 1023, 2**31, 101)).all()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 1.0]])
    assert lowest_argmax(values).tolist() == [1, 0]


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.8, 0.999999, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 3, 50])
def test_top_k_and_top_p_keep_what_the_definition_keeps(top_k: int, top_p: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    logits[5] = logits[9]
    kept = keep_mask(torch.log_softmax(logits, -1), top_k, top_p)
    expected = law(logits.double(), 1.0, top_k, top_p) > 0
    assert torch.equal(kept, expected)


def test_reported_logprobs_obey_the_temperature_law() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    at = {t: sample(logits, [RowParams(t, -1, 1.0, 0, 0, 0)]).law(0)[0] for t in (1.0, 0.5, 2.0)}
    for temperature, logprobs in at.items():
        ours = logprobs[3] - logprobs[8]
        assert float(ours) == pytest.approx(float(at[1.0][3] - at[1.0][8]) / temperature, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draw_does_not_depend_on_the_rows_beside_it(temperature: float) -> None:
    logits = 4 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(4))
    rows = [RowParams(temperature, -1, 1.0, i, 0, 5) for i in range(64)]
    whole = sample(logits, rows)
    for size in (1, 3, 17):
        for start in range(0, 64 - size, size):
            beside = slice(start, start + size)
            part = sample(logits[beside], rows[beside])
            assert torch.equal(part.tokens, whole.tokens[beside])
            assert torch.equal(part.logprobs, whole.logprobs[beside])


def test_reported_logprobs_are_unbiased_over_a_large_vocabulary() -> None:
    logits = 4 * torch.randn(8, 49152, generator=torch.Generator().manual_seed(3))
    drawn = sample(logits, [RowParams(1.0, -1, 1.0, i, 0, 0) for i in range(8)])
    exact = torch.log_softmax(logits.double(), -1).gather(-1, drawn.tokens[:, None])[:, 0]
    assert float((drawn.logprobs.double() - exact).abs().max()) < 4e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 96), (576, 1536), (1536, 576), (32, 576), (576, 8)])
def test_a_row_of_a_product_does_not_depend_on_how_many_rows_come_with_it(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """What ROW_TILE promises, measured on this machine's BLAS."""
    inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    rows = torch.randn(256, inputs, generator=generator).to(dtype)
    whole = F.linear(rows, weight)
    for number in (8, 16, 24, 40, 64, 136, 256):
        assert torch.equal(F.linear(rows[:number], weight), whole[:number]), number
        assert torch.equal(F.linear(rows[-number:], weight), whole[-number:]), number
