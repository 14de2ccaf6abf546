"""The capture session that a request to the OpenAI or Anthropic routes belongs to, if any."""

import re
from typing import Annotated

from fastapi import Depends, Request

from tinker_gmi.bodies.captures import LABEL
from tinkercloud.chat.turn import TurnHooks
from tinkercloud.errors import InvalidField
from tinkercloud.routers.deps import ServicesDep, UserDep
from tinkercloud.services.captures.capture_recorder import TurnPlace

CAPTURE_HEADER = "x-capture-id"
GROUP_HEADER = "x-group-id"
# The first that is there. Agents that name their sessions already do so by one of the others.
EPISODE_HEADERS = ("x-episode-id", "x-trajectory-id", "x-session-id")


async def hooks_by_header(
    request: Request, user: UserDep, services: ServicesDep
) -> TurnHooks | None:
    """Of the session that a header names; None without it."""
    capture_id = request.headers.get(CAPTURE_HEADER)
    if capture_id is None:
        return None
    return await services.captures.sessions.hooks(user, capture_id, _place(request))


async def hooks_by_path(request: Request, user: UserDep, services: ServicesDep) -> TurnHooks:
    """Of the session that the URL names. Its labels win over those of headers."""
    return await services.captures.sessions.hooks(
        user, request.path_params["capture_id"], _place(request)
    )


def _place(request: Request) -> TurnPlace:
    group = request.path_params.get("group") or request.headers.get(GROUP_HEADER)
    episodes = (request.headers.get(name) for name in EPISODE_HEADERS)
    episode = request.path_params.get("episode") or next((e for e in episodes if e), None)
    for name, label in (("group", group), ("episode", episode)):
        if label is not None and not re.fullmatch(LABEL, label):
            text = f"the label of the {name} must be 1 to 128 of A-Z a-z 0-9 . _ : -"
            raise InvalidField(name, text)
    return TurnPlace(group, episode)


HeaderHooksDep = Annotated[TurnHooks | None, Depends(hooks_by_header)]
PathHooksDep = Annotated[TurnHooks, Depends(hooks_by_path)]
