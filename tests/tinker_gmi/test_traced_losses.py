"""Traced losses as JSON: node for node what the official client sends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tinker.lib.public_interfaces import custom_loss as official

from tinker_gmi.losses.traced_loss import encoded_graph, trace_loss


def squares(logprobs: torch.Tensor, weights: torch.Tensor):
    loss = ((logprobs * weights) ** 2).sum(dim=-1)
    return loss, {"custom/loss:sum": loss}


def odd_arguments(logprobs: torch.Tensor):
    tail = logprobs[1:, ..., None].to(torch.float32)
    bounded = torch.clamp(tail, min=float("-inf"), max=None)
    zeros = torch.zeros_like(bounded, device=torch.device("cpu"), layout=torch.strided)
    grown = zeros + bounded.contiguous(memory_format=torch.contiguous_format)
    return torch.nn.functional.softplus(grown).mean(), {}


def attributes(logprobs: torch.Tensor):
    return -logprobs.T.sum() / logprobs.shape[0], {}


@pytest.mark.parametrize("function", [squares, odd_arguments, attributes])
def test_the_graph_is_that_of_the_official_client(function: Callable[..., Any]) -> None:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    ranks = dict.fromkeys(names, 1)
    theirs = official.encode_graph(official.trace_loss(function, ranks, "s"))
    ours = encoded_graph(trace_loss(function, ranks))
    assert ours.to_json_dict() == theirs.model_dump(mode="json")


def captures(logprobs: torch.Tensor):
    return (logprobs * torch.ones(3)).sum() + CAPTURED.sum(), {}


CAPTURED = torch.ones(2)


def keyword(logprobs: torch.Tensor, *, weights: torch.Tensor):
    return (logprobs * weights).sum(), {}


def no_pair(logprobs: torch.Tensor):
    return logprobs.sum()


def not_a_method(logprobs: torch.Tensor):
    return logprobs.no_such_method(), {}


@pytest.mark.parametrize(
    ("function", "ranks", "words"),
    [
        (captures, {"logprobs": 1}, "outside"),
        (keyword, {"logprobs": 1, "weights": 1}, "positional"),
        (no_pair, {"logprobs": 1}, "must return"),
        (not_a_method, {"logprobs": 1}, "no method of tensors"),
        (squares, {"logprobs": 1}, "input_ranks"),
        (attributes, {"logprobs": 0}, "rank"),
    ],
)
def test_what_cannot_be_sent_is_named(
    function: Callable[..., Any], ranks: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trace_loss(function, ranks)
