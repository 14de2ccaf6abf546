"""One seeded reinforcement run through the official SDK, on both backends: the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import tinker
from tinker import types

from tests.cluster.cpu.serving import cluster_arguments
from tests.cluster.cpu.tiny import write_model
from tests.serving import start_server

pytestmark = pytest.mark.slow

NUM_STEPS, GROUP, NUM_NEW = 4, 4, 12
PROMPTS = ([5, 17, 42], [8, 8, 9, 100, 3], [200])


@dataclass
class Run:
    """What a run did: sampled tokens and their log-probabilities, losses, gradient norms."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)  # of one text, before and after


def reward(tokens: list[int]) -> float:
    """The share of even tokens: something that sampling alone does not settle."""
    return float(np.mean([token % 2 == 0 for token in tokens]))


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens = prompt + list(sequence.tokens)
    held = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * held + list(sequence.logprobs),
            "advantages": [0.0] * held + [advantage] * len(sequence.tokens),
        },
    )


def train(service: tinker.ServiceClient) -> Run:
    run = Run()
    model = service.create_lora_training_client("tiny", rank=8, seed=3).result()
    for step in range(NUM_STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        if step == 0:
            run.scores.append(scores(sampler))
        asked = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(tokens=prompt),
                num_samples=GROUP,
                sampling_params=types.SamplingParams(
                    max_tokens=NUM_NEW, temperature=0.9, top_p=0.95, seed=100 * step + i
                ),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        data = []
        for prompt, future in zip(PROMPTS, asked, strict=True):
            sequences = future.result().sequences
            rewards = [reward(list(s.tokens)) for s in sequences]
            for sequence, gained in zip(sequences, rewards, strict=True):
                run.tokens.append(list(sequence.tokens))
                run.logprobs += list(sequence.logprobs)
                data.append(datum(prompt, sequence, gained - float(np.mean(rewards))))
        forward_backward = model.forward_backward(data, "importance_sampling")
        stepping = model.optim_step(types.AdamParams(learning_rate=2e-2))
        run.losses.append(forward_backward.result().metrics["loss:sum"])
        run.grad_norms.append(stepping.result().metrics["unclipped_grad_l2:mean"])
    run.scores.append(scores(model.save_weights_and_get_sampling_client().result()))
    return run


def scores(sampler: tinker.SamplingClient) -> list[float]:
    """Log-probabilities of a fixed text."""
    text = types.ModelInput.from_ints(tokens=list(range(3, 40)))
    return sampler.compute_logprobs(text).result()[1:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("runs")
    folder = write_model("llama", root / "model")
    found = {}
    backends: dict[str, Callable[[], tuple[str, ...]]] = {
        "embedded": lambda: ("--backend", "embedded"),
        "cluster": lambda: cluster_arguments(ranks=2, tp=2),
    }
    for name, arguments in backends.items():
        model = ("--model", f"tiny={folder}", "--dtype", "float32")
        with start_server(*model, *arguments(), data_dir=root / name / "data") as server:
            service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
            found[name] = train(service)
            service.close("success").result()
    return found


def test_the_same_tokens_are_sampled(runs):
    assert runs["cluster"].tokens == runs["embedded"].tokens
    assert len({tuple(tokens) for tokens in runs["cluster"].tokens}) > NUM_STEPS * len(PROMPTS)
    np.testing.assert_allclose(runs["cluster"].logprobs, runs["embedded"].logprobs, atol=1e-4)


def test_losses_and_gradients_agree(runs):
    ours, theirs = runs["cluster"], runs["embedded"]
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=1e-4)


def test_the_policy_has_moved(runs):
    """Otherwise the agreement above would say little."""
    before, after = np.array(runs["cluster"].scores)
    assert np.abs(after - before).max() > 0.05
    np.testing.assert_allclose(runs["cluster"].scores, runs["embedded"].scores, atol=1e-4)
