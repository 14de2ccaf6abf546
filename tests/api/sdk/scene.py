"""What tests of both clients do with either."""

from dataclasses import dataclass
from typing import Any

from tests.api.thread_server import MODEL


@dataclass(frozen=True)
class Scene:
    """A client library, and what the tests make with its types."""

    sdk: Any

    @property
    def types(self) -> Any:
        return self.sdk.types

    @property
    def prompt(self) -> Any:
        return self.types.ModelInput.from_ints([1, 2, 3])

    @property
    def greedy(self) -> Any:
        return self.types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])

    @property
    def adam(self) -> Any:
        return self.types.AdamParams(learning_rate=0.1)

    @property
    def data(self) -> list[Any]:
        return [self.datum([i, i + 1, i + 2, 5]) for i in range(1, 6)]

    def datum(self, tokens: list[int]) -> Any:
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        model_input = self.types.ModelInput.from_ints(tokens[:-1])
        return self.types.Datum(model_input=model_input, loss_fn_inputs=inputs)

    def connect(self, **address: str) -> Any:
        return self.sdk.ServiceClient(**address)

    def train(self, client: Any) -> float:
        """One pipelined step; the loss before it."""
        loss = client.forward_backward(self.data, "cross_entropy")
        step = client.optim_step(self.adam)
        assert step.result().metrics["unclipped_grad_l2:mean"] > 0
        return loss.result().metrics["loss:sum"]


def end(service: Any) -> None:
    closing = service.close("success")
    if closing is not None:  # ours has ended on return
        closing.result()


def training(service: Any, rank: int = 8) -> Any:
    return service.create_lora_training_client(MODEL, rank=rank, seed=1).result()
