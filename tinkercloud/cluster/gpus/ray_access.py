"""Whether a Ray lets this process in: with a token, without, or why not.

`ray.init` says only "Failed to connect" where a Ray demands a token, and in token mode it joins one
without tokens, where actors then fail. Ray's own health check names the reason within a second.
"""

import socket
import subprocess
import sys

from tinkercloud.config import (
    AuthMode,
    ray_auth_mode,
    ray_environment,
    ray_token_source,
    use_own_ray_token,
    use_ray_auth,
)
from tinkercloud.errors import ConfigError

LISTENS_S = 10.0
HEALTH_S = 40.0
_HEALTH_CHECK = ("-c", "from ray.scripts.scripts import main; main()", "health-check")
_ADVICE = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, with one file that every node sees, "
    "where the server and `ray start` run on each node"
)


def prepare(address: str) -> str:
    """Put what the Ray at that address needs into this process's environment, before Ray is
    imported; "": for one that this process starts. Returns how that Ray is guarded.

    Raises ConfigError, which says what to set.
    """
    return _prepare_join(address) if address else _prepare_own()


def _prepare_own() -> str:
    if ray_auth_mode() == "disabled":
        return "without tokens (RAY_AUTH_MODE=disabled)"
    return "with a token of its own" if use_own_ray_token() else _with_token()


def _prepare_join(address: str) -> str:
    if "://" in address:  # Ray's client has a port and a protocol of its own
        return "its tokens are not known"
    _check_listens(address)
    mode = ray_auth_mode()
    if _admits(address, "disabled"):
        if mode == "token":
            raise ConfigError(
                f"the Ray at {address} was started without tokens, but RAY_AUTH_MODE is token here "
                f"and actors would fail: start Ray anew with tokens ({_ADVICE}), or unset "
                "RAY_AUTH_MODE here"
            )
        use_ray_auth("disabled")
        return "without tokens (whoever reaches its ports can run code there)"
    source = ray_token_source()
    if mode == "disabled":
        raise ConfigError(
            f"the Ray at {address} demands a token, and RAY_AUTH_MODE is disabled here: {_ADVICE}"
        )
    if source is None:
        raise ConfigError(
            f"the Ray at {address} demands a token, and there is none here: {_ADVICE}. The head's "
            "is printed by `ray get-auth-token` there"
        )
    if not _admits(address, "token"):
        raise ConfigError(
            f"the Ray at {address} demands another token than that of {source}: {_ADVICE}"
        )
    use_ray_auth("token")
    return _with_token()


def _check_listens(address: str) -> None:
    """Raises ConfigError; Ray itself retries for half a minute before it says that nobody does."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray looks for its address itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENS_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray listens at {address}: {error.strerror or error}") from error


def _with_token() -> str:
    return f"with the token of {ray_token_source()}"


def _admits(address: str, mode: AuthMode) -> bool:
    """Raises ConfigError where it is no question of tokens. In a process of its own: Ray aborts one
    that finds no token, and keeps the mode of its first call."""
    command = [sys.executable, *_HEALTH_CHECK, "--address", address]
    try:
        answer = subprocess.run(
            command,
            env=ray_environment(mode),
            capture_output=True,
            text=True,
            timeout=HEALTH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the Ray at {address} did not answer within {HEALTH_S:g} s") from None
    if answer.returncode == 0:
        return True
    if "InvalidAuthToken" in answer.stderr + answer.stdout:
        return False
    lines = (answer.stderr.strip() or answer.stdout.strip() or "no reason").splitlines()
    raise ConfigError(f"the Ray at {address} is not healthy: {lines[-1]}")
