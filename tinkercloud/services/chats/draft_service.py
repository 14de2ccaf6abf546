"""Drafts of the server's own, trained when somebody asks for it."""

from typing import Any

from tinkercloud.backends.base import Backend
from tinkercloud.errors import Forbidden
from tinkercloud.services.chats.model_names import ModelNames
from tinkercloud.services.common.catalog import Catalog


class DraftService:
    def __init__(self, names: ModelNames, catalog: Catalog, backend: Backend):
        self._names, self._catalog, self._backend = names, catalog, backend

    async def train(self, user: str, model: str, *, sees_all: bool) -> dict[str, Any]:
        """The draft of a model, as the OpenAI API names it, will be trained. Its name at `/health`,
        and what is said there of its training so far. sees_all: whether the user sees the whole
        server's numbers. Raises Forbidden, and UserError where the draft does not learn."""
        sampler = await self._names.resolve(user, model)
        if not sees_all:
            raise Forbidden(
                "a draft is everybody's: administrators have it trained, and the users that "
                "metrics_users names"
            )
        name = self._catalog.backend_name(sampler.base_model)
        await self._backend.train_draft(name)
        speculation = self._backend.speculation()
        return {"base_model": name, "following": speculation.get(name, {}).get("following", {})}
