"""Whether this process can use a server: its key, and what the server says to it."""

from tinker_gmi.connection import settings
from tinker_gmi.connection.retries import RetryPolicy
from tinker_gmi.rest_client import RestClient


def get_tinker_token() -> str | None:
    """TINKER_API_KEY; None where it is not set."""
    return settings.api_key(None)


def tinker_has_credentials() -> bool:
    """Whether a key, or a command that prints one, is configured. Runs no command. A server of
    one's own may need none."""
    return settings.api_key(None) is not None or settings.credential_command() is not None


def raise_if_tinker_not_accessible() -> None:
    """Ask the server once, without retries, and raise the TinkerError that it ends with."""
    with RestClient(retry=RetryPolicy(give_up_s=0.0, max_billing_pause_s=0.0)) as client:
        client.get_server_capabilities().result()
