"""Amounts of memory, as people write and read them."""

import re

from tinkercloud.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Bytes of 512, "512MiB", "7.5 GiB" or "8GB". Raises ConfigError."""
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{value!r} is no amount of memory; write it as 512MiB, 7.5GiB or 8GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size_text(num_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if abs(num_bytes) >= _UNITS[unit.upper()]:
            return f"{num_bytes / _UNITS[unit.upper()]:.1f} {unit}"
    return f"{num_bytes} bytes"
