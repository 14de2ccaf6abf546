"""A digest of a tensor in one pass on its device, to compare what was sent with what arrived. It
detects mistakes; it is not cryptographic."""

import torch
from torch import Tensor

_WORDS_AT_ONCE = 2**24


def tensor_digest(tensor: Tensor) -> str:
    """Of dtype, shape and bytes: sums of 64-bit words, plain and weighted by odd numbers by place,
    both modulo 2**64, so that swapped or shifted words change it."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = len(flat) % 8
    words = flat[: len(flat) - rest].view(torch.int64) if len(flat) >= 8 else flat[:0].long()
    plain = weighted = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        places = torch.arange(start, start + len(part), device=part.device).mul_(2).add_(1)
        plain += int(part.sum())
        weighted += int((part * places).sum())
    tail = bytes(flat[len(flat) - rest :].tolist()).hex()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype)[6:]}:{shape}:{plain % 2**64:016x}:{weighted % 2**64:016x}:{tail}"
