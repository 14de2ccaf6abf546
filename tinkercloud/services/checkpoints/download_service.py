"""Downloads: signed links to exported files and archives, and what is behind them."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tinker_gmi.types import CheckpointArchiveUrlResponse, ExternalWeightsUrlsResponse
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import BaseModelNotServed, CheckpointNotFound, InvalidRequest
from tinkercloud.services.accounts.signed_links import LIFETIME_S, SignedLink, check, sign
from tinkercloud.services.checkpoints import checkpoint_files
from tinkercloud.services.checkpoints.archive import tar_of
from tinkercloud.services.checkpoints.checkpoint_service import CheckpointService
from tinkercloud.services.checkpoints.checkpoint_writer import FOLDER
from tinkercloud.services.checkpoints.external_files import Parts, exported_files, whole
from tinkercloud.services.common.catalog import Catalog
from tinkercloud.storage.metadata import Checkpoint

ARCHIVE = "archive.tar"  # no checkpoint has a file of this name


@dataclass(frozen=True, slots=True)
class Download:
    """path: where the content is one file on disk; else the content is `parts`."""

    file: str
    parts: Parts
    path: Path | None = None


class DownloadService:
    """secret: what links are signed with."""

    def __init__(
        self,
        checkpoints: CheckpointService,
        catalog: Catalog,
        secret: bytes,
        data_dir: Path,
    ):
        self._checkpoints = checkpoints
        self._catalog = catalog
        self._secret = secret
        self._data_dir = data_dir

    # links: of checkpoints that the user may read

    async def external_urls(
        self, user: str, path: str, base_url: str
    ) -> ExternalWeightsUrlsResponse:
        """A link to each file of an export. Raises InvalidRequest for other checkpoints."""
        checkpoint = await self._checkpoints.readable(user, path)
        if checkpoint.segment != "external_weights":
            raise InvalidRequest(
                f"{path} is no export; make one with save_weights_external and ask for that one's "
                "URLs"
            )
        names = await asyncio.to_thread(
            checkpoint_files.sealed_files, self._data_dir / checkpoint.directory
        )
        await self._audit(user, checkpoint)
        expires = int(time.time()) + LIFETIME_S
        links = [self._link(user, checkpoint, name, expires) for name in names]
        return ExternalWeightsUrlsResponse(
            urls={link.file: base_url + link.url_path for link in links},
            expires=datetime.fromtimestamp(expires, UTC),
        )

    async def archive_url(
        self, user: str, path: str, base_url: str
    ) -> CheckpointArchiveUrlResponse:
        """A link to a tar of the files that other programs read, of any checkpoint."""
        checkpoint = await self._checkpoints.readable(user, path)
        await self._audit(user, checkpoint)
        expires = int(time.time()) + LIFETIME_S
        link = self._link(user, checkpoint, ARCHIVE, expires)
        return CheckpointArchiveUrlResponse(
            url=base_url + link.url_path, expires=datetime.fromtimestamp(expires, UTC)
        )

    async def _audit(self, user: str, checkpoint: Checkpoint) -> None:
        """Links are downloads that begin: what is fetched by one is not asked for here again."""
        await self._checkpoints.audit(checkpoint, "checkpoint_downloaded", actor=user)

    def _link(self, user: str, checkpoint: Checkpoint, file: str, expires: int) -> SignedLink:
        c = checkpoint
        link = SignedLink(c.model_id, c.segment, c.name, Path(c.directory).name, file, user)
        return sign(link, self._secret, expires)

    # what is behind a link

    async def open(self, link: SignedLink) -> Download:
        """Raises LinkRefused for a link that is not ours or has ended, CheckpointNotFound where
        its reader may no longer read the checkpoint."""
        check(link, self._secret)
        directory = Path(FOLDER, link.run_id, link.segment, link.name, link.generation)
        checkpoint = await self._checkpoints.require_readable(
            link.reader, str(directory), f"{link.run_id}/{link.segment}/{link.name}"
        )
        folder = self._data_dir / directory
        if link.file != ARCHIVE:
            if not (folder / link.file).is_file():  # removed at this moment
                raise CheckpointNotFound(checkpoint.tinker_path)
            return Download(link.file, whole(folder / link.file), folder / link.file)
        files = await asyncio.to_thread(exported_files, folder, self._served(checkpoint))
        return Download(f"{checkpoint.name}.tar", tar_of(files, checkpoint.created_at))

    def _served(self, checkpoint: Checkpoint) -> ServedModel | None:
        try:
            return self._catalog.get(checkpoint.base_model)
        except BaseModelNotServed:
            return None
