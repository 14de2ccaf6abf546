"""Custom losses: differentiated in the client, trained on the server (specification 7.9).

The server reports log-probabilities; the client computes the loss C and g = dC/dlogprobs;
cross_entropy with weights -g then has exactly the gradient g on the server.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinker_gmi.bodies.results import ForwardBackwardOutput
from tinker_gmi.bodies.tensors import Datum, TensorData

CustomLossFn = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""(data, one torch tensor of log-probabilities per datum) -> (loss, metrics)."""


@dataclass(frozen=True, slots=True)
class LocalLoss:
    """data carries -g as weights; value is C."""

    data: list[Datum]
    value: float
    metrics: Mapping[str, float]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """The datums of the forward pass: targets and weights only; missing weights are zeros."""
    return [_with_weights(datum, datum.loss_fn_inputs.get("weights")) for datum in data]


def _with_weights(datum: Datum, weights: TensorData | None) -> Datum:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise ValueError("a custom loss needs target_tokens in every datum")
    targets = datum.loss_fn_inputs["target_tokens"]
    if weights is None:
        weights = TensorData.from_numpy(np.zeros(targets.shape or [], np.float32))
    inputs = {"target_tokens": targets, "weights": weights}
    return datum.replace(loss_fn_inputs=inputs)


def differentiate(
    data: list[Datum], loss_fn: CustomLossFn, forward: ForwardBackwardOutput
) -> LocalLoss:
    """Raises ValueError where the loss does not depend on the log-probabilities of a datum."""
    torch = importlib.import_module("torch")
    logprobs = [
        torch.tensor(output["logprobs"].to_numpy(), requires_grad=True)
        for output in forward.loss_fn_outputs
    ]
    loss, metrics = loss_fn(data, logprobs)
    loss.sum().backward()
    backward_data: list[Datum] = []
    for index, (datum, logprob) in enumerate(zip(data, logprobs, strict=True)):
        if logprob.grad is None:
            raise ValueError(f"the loss does not depend on the logprobs of datum {index}")
        backward_data.append(_with_weights(datum, TensorData.from_torch(-logprob.grad)))
    return LocalLoss(backward_data, float(loss.detach().sum()), metrics)


def with_local_metrics(output: ForwardBackwardOutput, local: LocalLoss) -> ForwardBackwardOutput:
    """`loss:sum` is C; the server's loss:sum becomes `surrogate_loss:sum`."""
    surrogate = {"surrogate_loss:sum": output.metrics["loss:sum"], "loss:sum": local.value}
    return output.replace(metrics={**output.metrics, **surrogate, **local.metrics})
