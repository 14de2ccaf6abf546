"""Numbers of the host copied to the device without waiting for the work that the device has."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; on a CPU itself.

    A copy from pageable memory would wait for all earlier work of its stream. The page-locked copy
    belongs to torch's cache and is not used again before the device has read it.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
