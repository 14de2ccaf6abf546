"""The official SDK's provenance and stable_reinforce against a server process on the fake backend,
called as the cookbook 0.6.1 calls them by its defaults."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests import serving
from tests.api.provenance_data import single_turn

MODEL = "fake/tiny"
PARAMS = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5)
ADAM = types.AdamParams(learning_rate=0.1)


@pytest.fixture
def service(sdk_server: serving.Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient()
    yield client
    client.close("success").result()


def test_steps_of_stable_reinforce_raise_the_rewarded_token(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    prompt, rewarded = [1, 2, 3], []
    for step in range(5):
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        params = PARAMS.model_copy(update={"seed": step})
        sequences = sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result().sequences
        rewards = [float(np.mean(np.array(s.tokens) % 2 == 0)) for s in sequences]
        rewarded.append(float(np.mean(rewards)))
        data = [
            single_turn(prompt, s, reward - rewarded[-1])
            for s, reward in zip(sequences, rewards, strict=True)
        ]
        result = client.forward_backward(data, "stable_reinforce")
        client.optim_step(ADAM).result()
        assert len(result.result().loss_fn_outputs) == 8
    assert rewarded[-1] > rewarded[0]


def test_two_turns_of_one_conversation_are_one_datum(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    spans, tokens, logprobs = [], [4, 5], [0.0, 0.0]
    covered = 0
    for turn in range(2):
        prompt = types.ModelInput.from_ints(tokens)
        [sequence] = sampler.sample(prompt, 1, PARAMS).result().sequences
        name, drawn = sequence.sequence_id, list(sequence.tokens)
        spans += [
            types.PromptProvenanceSpan(
                sequence_id=name, offset=covered, length=len(tokens) - covered
            ),
            types.SampledProvenanceSpan(sequence_id=name, length=len(drawn)),
        ]
        tokens, logprobs = tokens + drawn, logprobs + sequence.logprobs
        covered = len(tokens)
        if turn == 0:  # the user's next message
            tokens, logprobs = [*tokens, 6, 7], [*logprobs, 0.0, 0.0]
    advantages = np.array(logprobs[1:], np.float32) != 0
    first, last = spans[0], spans[-1]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array(logprobs[1:], np.float32),
            "advantages": advantages.astype(np.float32),
        },
    ).with_provenance(
        model_input=[
            *spans[:-1],
            types.SampledProvenanceSpan(sequence_id=last.sequence_id, length=last.length - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(
                sequence_id=first.sequence_id, offset=1, length=first.length - 1
            ),
            *spans[1:],
        ],
    )
    result = client.forward_backward([datum], "stable_reinforce").result()
    assert result.metrics["loss:sum"] == pytest.approx(-advantages.sum(), rel=1e-5)


def test_a_sampler_that_did_not_record_fails_as_the_users_fault(
    service: tinker.ServiceClient,
) -> None:
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    [sequence] = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, PARAMS).result().sequences
    with pytest.raises(tinker.RequestFailedError, match="record_stability_info=True"):
        client.forward_backward([single_turn([1, 2], sequence, 1.0)], "stable_reinforce").result()
    assert client.optim_step(ADAM).result() is not None
