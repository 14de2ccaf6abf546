"""Which hosts webhooks may be at: those of the operator's list, by name and port."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tinkercloud.errors import ConfigError, InvalidRequest

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class WebhookHosts:
    allowed: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, setting: str) -> "WebhookHosts":
        """HOST:PORT, separated by commas; "none". Raises ConfigError."""
        names = [] if setting.strip() in ("", "none") else setting.split(",")
        return cls(frozenset(_host_and_port(name.strip()) for name in names))

    def require(self, url: str) -> SplitResult:
        """The parts of a URL that may be asked. Raises InvalidRequest."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            raise InvalidRequest("webhook is no URL") from None
        if parts.scheme not in _PORTS or not parts.hostname or port is None:
            raise InvalidRequest("webhook must be a URL of http or https")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise InvalidRequest("webhook may have no user, password or fragment")
        if (parts.hostname.lower(), port) not in self.allowed:
            raise InvalidRequest(
                f"webhooks to {parts.hostname}:{port} are not allowed on this server; its operator "
                "allows hosts by the setting reward_hosts. Or post rewards to the session"
            )
        return parts


def _host_and_port(name: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{name}")
        rest = parts.path + parts.query + parts.fragment
        if parts.hostname and parts.port and not rest and "@" not in name:
            return parts.hostname.lower(), parts.port
    except ValueError:
        pass
    raise ConfigError(f"reward_hosts has {name!r}, which is not HOST:PORT")
