"""The versions of weights behind samplers: published at the first use, and again where the backend
has lost them.

Samplers of one checkpoint, or of one base model, share a version. What a model's ephemeral save
published is written down as files when the model goes to the disk; without these the model's
operations are done again.
"""

from tinkercloud.core.types import FromBase, FromCheckpoint, FromModel
from tinkercloud.errors import TinkercloudError, VersionLost
from tinkercloud.services.models.dependencies import Dependencies
from tinkercloud.services.recovery.version_store import version_key
from tinkercloud.storage.journal import RanOperation
from tinkercloud.storage.metadata import Sampler


class SamplerVersions:
    def __init__(self, dependencies: Dependencies):
        self._backend = dependencies.backend
        self._catalog = dependencies.catalog
        self._metadata = dependencies.metadata
        self._lanes = dependencies.tasks.lanes
        self._checkpoints = dependencies.checkpoints
        self._on_policy = dependencies.on_policy
        self._versions = dependencies.versions
        self._recovery = dependencies.recovery
        self._published = dependencies.published_weights
        self._recovery.publish_again = self._publish_operation

    async def close(self) -> None:
        await self._versions.close()

    async def get(self, sampler: Sampler) -> str:
        """The version that it samples, published now if there is none. Raises VersionLost."""

        async def publish() -> str:
            return await self._publish(sampler)

        return await self._versions.get(version_key(sampler), sampler.sampler_id, publish)

    async def put(self, sampler: Sampler, version: str) -> None:
        """version: published from the sampler's model; its samplers follow it from now on."""
        assert sampler.model_id is not None
        await self._versions.put(version_key(sampler), version, (sampler.user, sampler.model_id))

    async def drop(self, sampler: Sampler, version: str) -> None:
        """The backend has lost it."""
        await self._versions.drop(version_key(sampler), version)

    async def leave(self, sampler: Sampler) -> None:
        """It samples no more, or not for a while."""
        await self._versions.leave(version_key(sampler), sampler.sampler_id)

    async def _publish(self, sampler: Sampler) -> str:
        name = self._catalog.backend_name(sampler.base_model)
        if sampler.kind == "base":
            return await self._backend.publish(FromBase(name))
        if sampler.directory is None:
            return await self._publish_saved(sampler, name)
        try:
            directory = await self._checkpoints.verified_directory(sampler.directory)
            version = await self._backend.publish(FromCheckpoint(name, directory))
        except (OSError, TinkercloudError):
            # Where it was deleted meanwhile, that is what is said.
            path = sampler.model_path or sampler.directory
            await self._checkpoints.require_readable(sampler.user, sampler.directory, path)
            raise
        self._on_policy.loaded(sampler.directory, version)
        return version

    async def _publish_operation(self, operation: RanOperation) -> None:
        """What an ephemeral save did, by a model that was brought back to the same point."""
        sampler = await self._metadata.sampler_of_request(operation.request_id, operation.user)
        if sampler is not None:  # else its session was finished
            await self.put(sampler, await self._backend.publish(FromModel(operation.model_id)))

    async def _publish_saved(self, sampler: Sampler, base_model: str) -> str:
        """A model's weights as they were when the sampler was made, from the files of a snapshot or
        by doing the model's operations again. Raises VersionLost."""
        assert sampler.model_id is not None
        key = version_key(sampler)
        if sampler.kind == "inflight":  # the files may be of an earlier save than the last one
            await self._recovery.ensure(self._lanes, sampler.user, sampler.model_id)
        directory = await self._published.find(sampler.user, key)
        if directory is None or self._versions.current(key) is not None:
            await self._recovery.ensure(self._lanes, sampler.user, sampler.model_id)
            version = self._versions.current(key)
            if version is not None:
                return version
            # While the model's lane was waited for, it may have gone to the disk as unused.
            directory = await self._published.find(sampler.user, key)
            if directory is None:
                raise VersionLost(sampler.sampler_id)
        version = await self._published.read(
            *(sampler.user, key, directory),
            lambda place: self._backend.publish(FromCheckpoint(base_model, place)),
        )
        self._on_policy.loaded(key, version)
        return version
