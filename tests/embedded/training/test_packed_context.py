"""A pass over packed weights under autograd against one over the tensors."""

import pytest
import torch

from tests.embedded.decode_scene import version, with_weights
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.native.compiler import library
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.embedded.training.packed_context import PackedContext, frozen_context

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


def test_logits_and_the_adapters_gradient_are_those_of_the_tensors(base: BaseModel) -> None:
    packed = with_weights(base, base.weights)
    adapted = version(base, 4, 1)
    assert adapted.adapter is not None
    params = [t.requires_grad_() for pair in adapted.adapter.values() for t in pair]
    ids = torch.arange(30)
    positions = torch.cat([torch.arange(20), torch.arange(10)])
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(30, base.config.vocab_size, generator=numbers)

    def results(context: TrainContext) -> list[torch.Tensor]:
        hidden = base.architecture.hidden(context, ids, positions)
        logits = base.architecture.unembed(context, hidden)
        return [logits.detach(), *torch.autograd.grad((logits * weight).sum(), params)]

    context = frozen_context(packed.weights, [20, 10], adapted.entry)
    assert isinstance(context, PackedContext)
    plain = frozen_context(base.weights, [20, 10], adapted.entry)
    assert not isinstance(plain, PackedContext)
    for found, expected in zip(results(context), results(plain), strict=True):
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)


def test_an_embedding_is_the_tensors_row(base: BaseModel) -> None:
    context = frozen_context(with_weights(base, base.weights).weights, [3], None)
    expected = base.weights["model.embed_tokens"][2:3]
    assert torch.equal(context.embed(torch.tensor([2])), expected)
