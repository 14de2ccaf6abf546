"""Where workers and proxies listen, and the keys that they ask for."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from tinkercloud.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def parse_address(text: str) -> Address:
    """Of "HOST:PORT", IPv6 in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"{text!r} is no address of a worker; write HOST:PORT")
    return Address(host, int(port))


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Of "HOST:PORT,HOST:PORT". Raises ConfigError."""
    return tuple(parse_address(part.strip()) for part in text.split(","))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_key(path: Path) -> str:
    """Raises ConfigError."""
    try:
        key = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key in {path}: {error.strerror}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"{path} holds no key: one line of printable ASCII characters is wanted")
    return key
