"""Flags for official clients: what client/config answers (wire specification, section 2.1)."""

import re
from collections.abc import Mapping

FIRST_WITH_WHOAMI = (0, 24)


def client_flags(sdk_version: str, chosen: Mapping[str, object]) -> dict[str, object]:
    """The flags of a client; `chosen` win.

    pjwt_auth_enabled makes a client exchange its key for a token, one request at its start;
    `whoami` answers from that token alone. Earlier clients have no `whoami`.
    """
    version = re.match(r"(\d+)\.(\d+)", sdk_version)
    if version is None or tuple(map(int, version.groups())) < FIRST_WITH_WHOAMI:
        return dict(chosen)
    return {"pjwt_auth_enabled": True, **chosen}
