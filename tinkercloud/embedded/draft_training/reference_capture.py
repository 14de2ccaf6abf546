"""A sequence as a policy sees it, by a pass of its own: for evaluating a draft, and for making one
where no training has gone by. Slow and obvious; a policy's own passes give the same for nothing.

Axes: N tokens, L layers, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkercloud.embedded.draft_training.head_trainer import CapturedSequence, SequenceMetadata
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.training.context import TrainContext
from tinkercloud.speculative.learning.cases import Tokens


@torch.no_grad()
def capture(
    version: Version, tokens: Tokens, layers: Sequence[int], told: SequenceMetadata
) -> CapturedSequence:
    """layers: as in HeadConfig."""
    ids = version.base.tensor(tokens.astype("int64"))
    context = TrainContext(
        version.weights, [len(tokens)], adapter=version.adapter, scale=version.scale
    )
    outputs = layer_outputs(version, context, ids)
    hidden = torch.stack([outputs[layer - 1] for layer in layers], 1)
    logits = version.base.architecture.unembed(context, outputs[-1])
    return CapturedSequence.of(ids, hidden, logits, told)


def layer_outputs(version: Version, context: TrainContext, ids: Tensor) -> list[Tensor]:
    """(N, D) after each block; the last one after the final norm."""
    architecture = version.base.architecture
    cos, sin = architecture.rotary(torch.arange(len(ids), device=ids.device))
    x = context.embed(ids)
    outputs = []
    for index in range(version.base.config.num_layers):
        x = architecture.layer(context, index, x, cos, sin)
        outputs.append(x)
    outputs[-1] = architecture.final_norm(context, x)
    return outputs
