"""A custom loss on the server has the gradient of the client's own path; by the official client."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

import tinker_gmi
from tests.api.thread_server import serve
from tinkercloud.app import create_app
from tinkercloud.config import Config, ModelSource
from tinkercloud.storage.keys import KeyStore

MODEL = "tiny"
RANKS = {"logprobs": 1, "advantages": 1}


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            **{name: np.array(values, np.float32) for name, values in inputs.items()},
        },
    )


DATA = [
    datum([3, 4, 5, 6, 7], advantages=[0.0, 1.0, -2.0, 0.5]),
    datum([9, 8, 7, 6], advantages=[1.0, 1.0, 0.0]),
    datum([5, 5, 2, 1, 9, 4], advantages=[0.1, 0.2, 0.3, 0.4, 0.5]),
]


PLAIN = [datum([*d.model_input.to_ints(), 1]) for d in DATA]


def quadratic(logprobs: torch.Tensor, advantages: torch.Tensor):
    """Of a whole sequence: no sum over its tokens."""
    score = (logprobs * advantages).sum()
    loss = torch.nn.functional.softplus(score) + logprobs.exp().mean() ** 2
    return loss, {"custom/score:sum": score, "custom/score:mean": score}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """How to reach a server that runs custom losses, for two users."""
    data_dir = tmp_path_factory.mktemp("custom") / "data"
    store = KeyStore(data_dir)
    keys = {user: store.add(user) for user in ("ann", "bob")}
    store.close()
    config = Config(
        data_dir=data_dir, models=(ModelSource(MODEL, folder),), dtype="float32", speculate="off"
    )
    app = create_app(config, client_config={"custom_loss_server_side": True})
    with serve(app) as base_url:
        yield {"base_url": base_url, **keys}


@pytest.fixture
def service(server: dict[str, str]) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server["base_url"], api_key=server["ann"])
    yield client
    client.close("success").result()


def trained(client: tinker.TrainingClient) -> list[float]:
    """Log-probabilities of all data after one step."""
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    forward = client.forward(PLAIN, "cross_entropy").result()
    return [x for fields in forward.loss_fn_outputs for x in fields["logprobs"].tolist()]


def test_the_gradient_is_that_of_the_clients_own_path(service: tinker.ServiceClient) -> None:
    handle = service.create_custom_loss(quadratic, RANKS).result()
    assert handle.loss_id is not None
    mine, theirs = [
        service.create_lora_training_client(MODEL, rank=4, seed=7).result() for _ in range(2)
    ]
    on_server = mine.forward_backward_custom(DATA, handle).result()

    def on_client(data, logprobs_list):
        pairs = [
            quadratic(logprobs, d.loss_fn_inputs["advantages"].to_torch())
            for d, logprobs in zip(data, logprobs_list, strict=True)
        ]
        return sum(loss for loss, _ in pairs), {
            "score": sum(float(m["custom/score:sum"].detach()) for _, m in pairs)
        }

    reference = theirs.forward_backward_custom(DATA, on_client).result()
    metrics = on_server.metrics
    assert metrics["loss:sum"] == pytest.approx(reference.metrics["loss:sum"], rel=1e-5)
    assert metrics["custom/score:sum"] == pytest.approx(reference.metrics["score"], rel=1e-4)
    assert metrics["custom/score:mean"] == pytest.approx(metrics["custom/score:sum"] / len(DATA))
    for a, b in zip(on_server.loss_fn_outputs, reference.loss_fn_outputs, strict=True):
        assert a["logprobs"].tolist() == pytest.approx(b["logprobs"].tolist(), abs=1e-5)
        assert set(a) == {"logprobs"}
    before = theirs.forward(PLAIN, "cross_entropy").result().metrics["loss:sum"]
    after = trained(mine)
    assert after == pytest.approx(trained(theirs), abs=1e-4)
    assert -sum(after) != pytest.approx(before, abs=1e-3), "the step changed nothing"


def test_our_client_uploads_the_same_loss(
    server: dict[str, str], service: tinker.ServiceClient
) -> None:
    official = service.create_custom_loss(quadratic, RANKS).result()
    client = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    expected = client.forward_backward_custom(DATA, official).result().metrics
    with tinker_gmi.ServiceClient(base_url=server["base_url"], api_key=server["ann"]) as ours:
        handle = ours.create_custom_loss(quadratic, RANKS).result()
        assert handle.loss_id is not None
        model = ours.create_lora_training_client(MODEL, rank=4, seed=7).result()
        data = [
            tinker_gmi.Datum.model_validate(
                {
                    "model_input": tinker_gmi.ModelInput.from_ints(d.model_input.to_ints()),
                    "loss_fn_inputs": {n: t.to_numpy() for n, t in d.loss_fn_inputs.items()},
                }
            )
            for d in DATA
        ]
        assert model.forward_backward_custom(data, handle).result().metrics == expected


def test_chunks_of_one_call_are_put_together(service: tinker.ServiceClient) -> None:
    handle = service.create_custom_loss(quadratic, {"logprobs": 1, "advantages": 1}).result()
    client = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    whole = client.forward_backward_custom(DATA, handle).result().metrics
    parts = [client.forward_backward_custom([d], handle).result().metrics for d in DATA]
    for name in ("loss:sum", "custom/score:sum"):
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-5)


def test_a_fault_fails_its_call_and_leaves_the_model_usable(service: tinker.ServiceClient) -> None:
    def late(logprobs: torch.Tensor):
        return logprobs[99], {}

    handle = service.create_custom_loss(late, {"logprobs": 1}).result()
    client = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    with pytest.raises(tinker.RequestFailedError, match="'getitem'"):
        client.forward_backward_custom(DATA, handle).result()
    assert client.optim_step(types.AdamParams()).result().metrics["unclipped_grad_l2:mean"] == 0.0


def test_an_operation_that_is_not_offered_is_refused_by_name(
    service: tinker.ServiceClient,
) -> None:
    def noisy(logprobs: torch.Tensor):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match="rand_like"):
        service.create_custom_loss(noisy, {"logprobs": 1}).result()


def test_a_loss_belongs_to_its_session(
    server: dict[str, str], service: tinker.ServiceClient
) -> None:
    handle = service.create_custom_loss(quadratic, {"logprobs": 1, "advantages": 1}).result()
    for user in ("ann", "bob"):
        other = tinker.ServiceClient(base_url=server["base_url"], api_key=server[user])
        client = other.create_lora_training_client(MODEL, rank=4).result()
        config = {"loss_id": handle.loss_id}
        with pytest.raises(tinker.RequestFailedError, match="not one of this session"):
            client.forward_backward(DATA, "custom", config).result()
        other.close("success").result()
