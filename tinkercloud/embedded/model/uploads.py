"""Numbers of the host brought to the device without waiting for what the device does."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.device_copy import to_device


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in its own type; on a CPU its own memory. See `to_device`."""
    return to_device(torch.from_numpy(array), device)
