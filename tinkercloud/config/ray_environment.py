"""What the environment says to Ray: telemetry, and tokens.

Ray 2.60 turns tokens on by itself where `ray.init` or `ray start --head` starts a Ray and finds a
token, but for nobody who joins one by its address.
"""

import os
import secrets
from pathlib import Path
from typing import Literal

from tinkercloud.errors import ConfigError

AuthMode = Literal["token", "disabled"]

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_DEFAULT_FILE = Path(".ray", "auth_token")  # in the home folder
_TOKEN_BYTES = 32


def quiet_ray() -> None:
    """Before Ray is imported: it reports nothing to anyone, starts no Ray unless it is told to, and
    leaves GPUs visible to whom it gives none (as it will by itself one day, and warns of until
    then)."""
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def ray_auth_mode() -> str | None:
    """What the environment asks for; None: nothing."""
    return os.environ.get(_MODE, "").lower() or None


def ray_token_source() -> str | None:
    """Where Ray takes its token from, in its order; None: it has none.

    Raises ConfigError for a file that is named and holds none: Ray would abort the process.
    """
    if os.environ.get(_TOKEN):
        return _TOKEN
    path = os.environ.get(_TOKEN_PATH)
    if path:
        if not _holds_token(Path(path)):
            raise ConfigError(f"{_TOKEN_PATH} is {path}, which cannot be read or is empty")
        return f"{_TOKEN_PATH}={path}"
    return f"~/{_DEFAULT_FILE}" if _holds_token(Path.home() / _DEFAULT_FILE) else None


def _holds_token(path: Path) -> bool:
    try:
        return bool(path.read_text().strip())
    except (OSError, UnicodeDecodeError):
        return False


def use_ray_auth(mode: AuthMode) -> None:
    """For this process and those that it starts. Before Ray is imported: it reads this once."""
    os.environ[_MODE] = mode


def use_own_ray_token() -> bool:
    """A token for a Ray of this process alone; False where the environment names one already.
    Ray itself would write one into the home folder, and every head that this user starts later
    would demand it."""
    use_ray_auth("token")
    if os.environ.get(_TOKEN) or os.environ.get(_TOKEN_PATH):
        return False
    os.environ[_TOKEN] = secrets.token_hex(_TOKEN_BYTES)
    return True


def ray_environment(mode: AuthMode) -> dict[str, str]:
    """Of a process that talks to Ray in this mode."""
    return {**os.environ, _MODE: mode}
