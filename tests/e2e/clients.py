"""Both clients behind the same few calls, for tests that must pass with either."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pyqwest  # noqa: F401  (see below)

from tests.serving import Server

# The SDK imports pyqwest at its first request, amid a test, on a thread of its own. Before CPython
# 3.12 an import fails ("KeyError", a thread's number; python/cpython issue 91351) where a garbage
# collection within it runs a finalizer that imports too, and these tests leave much garbage.

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Client:
    """An SDK module (`tinker` or `tinker_gmi`) connected to a server."""

    sdk: ModuleType
    service: Any

    @classmethod
    def connect(cls, sdk: ModuleType, server: Server) -> "Client":
        service = sdk.ServiceClient(base_url=server.base_url, api_key=server.api_key)
        return cls(sdk, service)

    def close(self) -> None:
        """The official client returns a future of it, ours has finished when it returns."""
        closing = self.service.close("success")
        if closing is not None:
            closing.result()

    def model(self, *, rank: int = 8, seed: int = 1) -> Any:
        creating = self.service.create_lora_training_client(MODEL, rank=rank, seed=seed)
        return creating.result()

    def base_sampler(self) -> Any:
        return self.service.create_sampling_client(base_model=MODEL).result()

    def prompt(self, tokens: list[int]) -> Any:
        return self.sdk.types.ModelInput.from_ints(tokens=tokens)

    def datum(self, tokens: list[int], **inputs: Any) -> Any:
        return self.sdk.types.Datum(model_input=self.prompt(tokens), loss_fn_inputs=inputs)

    def supervised(self, tokens: list[int], first_scored: int = 1) -> Any:
        """Predict every token from index `first_scored` on."""
        weights = [0.0] * (first_scored - 1) + [1.0] * (len(tokens) - first_scored)
        return self.datum(tokens[:-1], target_tokens=tokens[1:], weights=weights)

    def params(self, **values: Any) -> Any:
        return self.sdk.types.SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | values)

    def adam(self, learning_rate: float = 1e-3) -> Any:
        return self.sdk.types.AdamParams(learning_rate=learning_rate)

    def sample(self, sampler: Any, tokens: list[int], n: int = 1, **params: Any) -> list[Any]:
        future = sampler.sample(
            prompt=self.prompt(tokens), num_samples=n, sampling_params=self.params(**params)
        )
        return future.result().sequences

    def train(self, model: Any, data: list[Any], learning_rate: float = 1e-3) -> Any:
        """One forward_backward and one optim_step, both sent before either is waited for."""
        forward_backward = model.forward_backward(data, "cross_entropy")
        step = model.optim_step(self.adam(learning_rate))
        output = forward_backward.result()
        step.result()
        return output


def logprobs_of(output: Any, index: int = 0) -> np.ndarray:
    """The logprobs of one datum of a ForwardBackwardOutput."""
    return np.asarray(output.loss_fn_outputs[index]["logprobs"].to_numpy())


def on_policy_gauges(server: Server) -> dict[str, float]:
    """Of `/metrics`, by what comes after `tinkercloud_on_policy_`."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    start = "tinkercloud_on_policy_"
    pairs = (line.removeprefix(start).split(" ") for line in lines if line.startswith(start))
    return {name: float(value) for name, value in pairs}
