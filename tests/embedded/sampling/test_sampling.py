"""The sampling engine against transformers and a slow reference, on a tiny random Llama."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.decode_scene import with_weights
from tests.embedded.exactness import assert_same_samples_in_company
from tests.embedded.tiny import (
    EOS,
    VOCAB,
    Sampler,
    ask,
    expected_distribution,
    random_prompt,
    reference,
    supervised,
    train,
)
from tinkercloud.core.types import AdamParams, FromBase, FromModel, LoraSpec
from tinkercloud.decoding.sampler import (
    gumbel_noise,
)
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling import scheduler


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which forward pass: everything here holds for both."""
    if request.param == "torch":
        monkeypatch.setattr(runners, "library", lambda: None)
    elif runners.library() is None:
        pytest.skip("there is no C compiler here")
    return request.param


@pytest.fixture
def base(store: ModelStore) -> str:
    return store.publish(FromBase("tiny"))


PROMPT = random_prompt(20, 0)


def logits_after(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double()


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
            probs = expected_distribution(logits_after(model, tokens), temperature, top_k, top_p)
            noise = gumbel_noise(11, index, len(tokens), VOCAB)
            assert int(token) == int((probs.log() + noise).argmax())
            assert logprob == pytest.approx(float(probs[token].log()), abs=2e-4)
            tokens.append(int(token))


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others(
    store: ModelStore, base: str, runner: str
) -> None:
    store.create_model("lora", "tiny", LoraSpec(rank=4, seed=1))
    store.create_model("full", "tiny", LoraSpec(rank=0, seed=1))
    for model_id in ("lora", "full"):
        train(store, model_id, [supervised(20, 1)])
        store.optim_step(model_id, AdamParams(learning_rate=0.01))
    versions = [base, store.publish(FromModel("lora")), store.publish(FromModel("full"))]
    repeated = {
        f"repeated {i}": (v, ask(PROMPT, n=2, max_tokens=150, seed=5, use_eos=False))
        for i, v in enumerate(versions)
    }
    alone = {name: Sampler(store).one(*request) for name, request in repeated.items()}
    rng = np.random.default_rng(3)
    others = {
        str(i): (
            versions[i % 3],
            ask(random_prompt(int(rng.integers(1, 300)), i), n=1 + i % 3, seed=i,
                max_tokens=int(rng.integers(1, 200))),
        )
        for i in range(16)
    }  # fmt: skip
    among = Sampler(store).run(others | repeated)
    for name, output in alone.items():
        assert_same_samples_in_company(output, among[name], is_exact=runner == "compiled")


def test_a_sample_depends_on_its_index_not_on_the_number_of_samples(
    store: ModelStore, base: str
) -> None:
    few = Sampler(store).one(base, ask(PROMPT, n=2, seed=9, use_eos=False))
    many = Sampler(store).one(base, ask(PROMPT, n=5, seed=9, use_eos=False))
    texts = [s.tokens.tolist() for s in many.sequences]
    assert texts[:2] == [s.tokens.tolist() for s in few.sequences]
    assert len({tuple(t) for t in texts}) == 5


@pytest.mark.parametrize("limits", [{"max_batch": 2}, {"kv_cache_bytes": 1}])
def test_tight_limits_change_nothing_but_time(
    store: ModelStore, base: str, limits: dict[str, int], runner: str
) -> None:
    requests = {
        str(i): (base, ask(random_prompt(5 + 9 * i, i), n=3, seed=i, max_tokens=20 + i))
        for i in range(4)
    }
    wide, tight = Sampler(store).run(requests), Sampler(store, **limits).run(requests)
    for name, output in wide.items():
        assert_same_samples_in_company(output, tight[name], is_exact=runner == "compiled")


def test_a_prompt_of_several_chunks_scores_as_transformers_does(
    store: ModelStore, base: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SCORED_CHUNK", 32)
    monkeypatch.setattr(scheduler, "PREFILL_ROWS", 64)
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


def test_topk_of_sampled_tokens_is_of_the_distribution_sampled_from(
    store: ModelStore, base: str
) -> None:
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


def test_end_of_sequence_ends_a_sample_unless_stopping_is_off(store: ModelStore, base: str) -> None:
    weights = dict(store.base("tiny").weights)
    eager = weights["lm_head"] = weights["lm_head"].clone()
    eager[EOS] = eager[greedy_tokens(store, base, 1)[0]] * 1.5
    store._bases["tiny"] = with_weights(store.base("tiny"), weights)
    base = store.publish(FromBase("tiny"))
    fresh = Sampler(store).one(base, ask(PROMPT, max_tokens=6, temperature=0.0))
    never = Sampler(store).one(base, ask(PROMPT, max_tokens=6, temperature=0.0, use_eos=False))
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
