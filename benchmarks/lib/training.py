"""A forward_backward call of the embedded engine by itself, without a server."""

import math

from tinkercloud.core.types import TrainBatch, TrainOutput
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.embedded.training.trainable_model import TrainableModel


def train_alone(model: TrainableModel, batch: TrainBatch, limits: Limits) -> TrainOutput:
    """Adds to the model's gradient. Raises the call's error."""
    queue = TrainingQueue(limits)
    queue.add(0, model, batch)
    (call,) = queue.step(math.inf)
    if call.output is None:
        raise call.error or AssertionError("a call has an output or an error")
    return call.output
