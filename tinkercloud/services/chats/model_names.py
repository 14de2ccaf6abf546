"""What the `model` of a request to the OpenAI and Anthropic routes stands for."""

import re
from collections import OrderedDict

from tinkercloud.core.types import ServedModel
from tinkercloud.errors import BaseModelNotServed, InvalidRequest, NotFound, UnknownModelName
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.services.models.sampling_service import SamplingService
from tinkercloud.storage.metadata import Checkpoint, Sampler

MAX_LISTED = 1000
MAX_WEIGHTS = 256  # of which versions are kept without a sampling session
_SCHEME = "tinker://"
_SAMPLER_ID = re.compile(r"[^:;/\s]+:sample:\S+")


class ModelNames:
    """Names of base models, paths of checkpoints, `<base model>;<path>`, ids of samplers."""

    def __init__(self, catalog: Catalog, checkpoints: CheckpointService, sampling: SamplingService):
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._sampling = sampling
        self._recent: OrderedDict[str, Sampler] = OrderedDict()

    async def resolve(self, user: str, name: str) -> Sampler:
        """Raises UnknownModelName, for what is another user's too."""
        try:
            return await self._resolved(user, name)
        except (NotFound, BaseModelNotServed, InvalidRequest) as error:
            raise UnknownModelName(name, str(error)) from None

    async def _resolved(self, user: str, name: str) -> Sampler:
        base_model, separator, path = name.partition(";")
        if separator:
            return await self._of_checkpoint(user, path, base_model)
        if name.startswith(_SCHEME):
            return await self._of_checkpoint(user, name, None)
        if name not in self._catalog.names and _SAMPLER_ID.fullmatch(name):
            return await self._sampling.require(user, name)
        base = self._catalog.get(name).name
        return await self._kept(Sampler(f"names:{user}:{base}", user, "", "base", base))

    async def _of_checkpoint(self, user: str, path: str, base_model: str | None) -> Sampler:
        checkpoint = await self._checkpoints.loadable(user, path)
        base = self._catalog.get(base_model or checkpoint.base_model).name
        directory = checkpoint.directory
        return await self._kept(
            Sampler(
                *(f"names:{user}:{base}:{directory}", user, "", "checkpoint", base),
                model_path=checkpoint.tinker_path,
                directory=directory,
            )
        )

    async def _kept(self, sampler: Sampler) -> Sampler:
        """Versions that nobody asks for any more are released; the next request publishes them."""
        self._recent[sampler.sampler_id] = sampler
        self._recent.move_to_end(sampler.sampler_id)
        while len(self._recent) > MAX_WEIGHTS:
            await self._sampling.release(self._recent.popitem(last=False)[1])
        return sampler

    async def listed(self, user: str) -> tuple[list[ServedModel], list[Checkpoint]]:
        """Base models, and the user's checkpoints, the newest first."""
        return [*self._catalog], await self._checkpoints.list(user, MAX_LISTED, 0)
