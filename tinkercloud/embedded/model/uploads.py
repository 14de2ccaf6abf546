"""Copies from host to device that do not wait for the work queued on the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkercloud.decoding.device_copy import to_device


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in its type; on a CPU in the same memory. See `to_device`."""
    return to_device(torch.from_numpy(array), device)
