"""The trainer's log-probabilities are those that were sampled, to the bit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.architectures.networks import FAMILIES
from tests.embedded.tiny import (
    Sampler,
    TinyStore,
    ask,
    open_store,
    random_prompt,
    train,
    tuned,
    write_tiny_family,
)
from tinkercloud.core.types import Datum, FromBase, LoraSpec, SampledSequence
from tinkercloud.embedded.native.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def store(request: pytest.FixtureRequest, folder: Path) -> TinyStore:
    return open_store(folder, tokens=200, dtype=request.param)


def datum(prompt: Sequence[int], sampled: SampledSequence) -> Datum:
    """A sample as it is trained on: targets are the next tokens."""
    tokens = np.array([*prompt, *sampled.tokens], np.int32)
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(prompt) - 1 :] = 1
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights}
    return Datum(tokens[:-1], inputs)


def assert_scored_as_sampled(
    store: TinyStore, model: str, data: Sequence[Datum], samples: Sequence[SampledSequence]
) -> None:
    """One by one, together, and while they are trained on."""
    together = train(store, model, list(data), forward_only=True).outputs
    trained = train(store, model, list(data)).outputs
    for i, sample in enumerate(samples):
        alone = train(store, model, [data[i]], forward_only=True).outputs[0]
        for output in (alone, together[i], trained[i]):
            np.testing.assert_array_equal(
                output["logprobs"][-len(sample.tokens) :], sample.logprobs
            )


def test_samples_of_several_models_are_scored_as_they_were_sampled(store: TinyStore) -> None:
    prompts = {f"m{i}": random_prompt(length, i) for i, length in enumerate((3, 16, 47, 90))}
    versions = {model: tuned(store, model, 4 * (i + 1), i) for i, model in enumerate(prompts)}
    requests = {m: (versions[m], ask(p, n=4, max_tokens=40)) for m, p in prompts.items()}
    outputs = Sampler(store).run(requests)
    for model, prompt in prompts.items():
        samples = outputs[model].sequences
        assert_scored_as_sampled(store, model, [datum(prompt, s) for s in samples], samples)


def test_full_weights_score_as_they_sample(store: TinyStore) -> None:
    store.create_model("full", "tiny", LoraSpec(rank=0, seed=0))
    prompt = random_prompt(33, 0)
    version = store.publish(FromBase("tiny"))
    samples = Sampler(store).one(version, ask(prompt, n=3, max_tokens=40)).sequences
    assert_scored_as_sampled(store, "full", [datum(prompt, s) for s in samples], samples)
