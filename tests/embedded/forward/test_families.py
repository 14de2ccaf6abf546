"""Passes through PyTorch over keys and values in blocks, against whole sequences at once."""

import pytest
import torch
from torch import Tensor

from tests.architectures.networks import SWITCHES
from tests.embedded.decode_scene import Scene, random_base, steps, tiny_config, version
from tinkercloud.embedded.forward.runners import GraphRunner, TorchRunner
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.context import TrainContext

FAMILIES = sorted({*SWITCHES, "Olmo2"} - {"Ministral"})
NUM_STEPS = 3


@torch.no_grad()
def whole(of: Version, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one sequence."""
    base = of.base
    context = TrainContext(base.weights, [len(tokens)], adapter=of.adapter, scale=of.scale)
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    return base.architecture.unembed(context, base.architecture.hidden(context, ids, positions))


@pytest.mark.parametrize("runner", [TorchRunner(), GraphRunner(None)], ids=["ragged", "step"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_one_by_one_have_the_logits_of_the_whole_sequence(
    family: str, runner: TorchRunner | GraphRunner
) -> None:
    """Prompts longer than a window, and shorter."""
    base = random_base(tiny_config(family, **SWITCHES.get(family, {})))
    adapted = version(base, 4, 1)
    scene = Scene.of([(adapted, 2)], [40, 5])
    found = steps(scene, runner, NUM_STEPS)
    for row, tokens in enumerate(scene.tokens):
        expected = whole(adapted, tokens)[-NUM_STEPS:]
        ours = torch.stack([step[row] for step in found])
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
