"""Numbers of the host brought to the device without waiting for what the device does."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in its own type; on a CPU its own memory.

    A copy from ordinary memory would wait for all that its stream was given before. The page-locked
    copy belongs to torch's cache and is not used again before the device has read it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
