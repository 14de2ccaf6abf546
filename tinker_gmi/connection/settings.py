"""The server's address and the API key: the argument first, then the environment."""

import os

DEFAULT_BASE_URL = "http://127.0.0.1:8700"


def base_url(argument: str | None) -> str:
    """The argument, else TINKER_BASE_URL, else DEFAULT_BASE_URL."""
    return argument or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL


def api_key(argument: str | None) -> str | None:
    """The argument, else TINKER_API_KEY, else none. The server alone checks it."""
    return argument or os.environ.get("TINKER_API_KEY") or None


def project_id(argument: str | None) -> str | None:
    """The argument, else TINKER_PROJECT_ID, else none."""
    return argument or os.environ.get("TINKER_PROJECT_ID") or None


def credential_command() -> str | None:
    """TINKER_CREDENTIAL_CMD: prints a credential, for organizations whose keys are short-lived."""
    return os.environ.get("TINKER_CREDENTIAL_CMD") or None


def tags() -> list[str]:
    """TINKER_TAGS: labels of the sessions of this process, separated by commas."""
    return [tag for part in os.environ.get("TINKER_TAGS", "").split(",") if (tag := part.strip())]
