"""What the commands about runs share: their settings, and an engine beside the server's."""

import argparse
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud.commands.options import Arguments, add_settings, config_of, with_models
from tinkercloud.config import Config
from tinkercloud.errors import UserError

if TYPE_CHECKING:
    from tinkercloud.backends.base import Backend
    from tinkercloud.services.common.catalog import Catalog
    from tinkercloud.services.runs.kept_runs import KeptRuns
    from tinkercloud.storage.database import Database

ENGINE_SETTINGS = ("models", "aliases", "dtype", "backend", "engine.threads")


def add_run_settings(parser: argparse.ArgumentParser, *, engine: bool = True) -> None:
    add_settings(parser, ["data_dir", *(ENGINE_SETTINGS if engine else ())])


@dataclass(frozen=True, slots=True)
class Archive:
    """The data folder, beside a running server or without one."""

    data_dir: Path
    database: "Database"
    runs: "KeptRuns"


@asynccontextmanager
async def opened(config: Config) -> AsyncGenerator[Archive]:
    """Raises UserError where the folder holds no server's data."""
    from tinkercloud.services.runs.kept_runs import KeptRuns
    from tinkercloud.storage.database import Database
    from tinkercloud.storage.database_file import DATABASE_NAME

    if not (config.data_dir / DATABASE_NAME).is_file():
        raise UserError(f"{config.data_dir} holds no server's data; name its folder: --data-dir")
    database = await Database.open(config.data_dir)
    try:
        yield Archive(config.data_dir, database, KeptRuns(database, config.data_dir))
    finally:
        await database.close()


@asynccontextmanager
async def engine(config: Config) -> AsyncGenerator["tuple[Backend, Catalog]"]:
    """A backend of this process's own, as the settings say. Raises UserError for one whose models
    do not come back."""
    from tinkercloud.app import load_backend
    from tinkercloud.services.common.catalog import Catalog

    if config.backend == "cluster":
        raise UserError("runs of the cluster backend are not kept: there is nothing to replay")
    with tempfile.TemporaryDirectory(prefix="tinkercloud-") as folder:
        backend = load_backend(replace(config, data_dir=Path(folder), speculate="off"))
        served = await backend.start()
        try:
            yield backend, Catalog(served, config.aliases, config.max_topk_logprobs)
        finally:
            await backend.stop()


def engine_config(arguments: Arguments) -> Config:
    return with_models(config_of(arguments))


def place_of_base(config: Config, catalog: "Catalog", name: str) -> Path | None:
    """The files of a base model; None: it has none. Raises BaseModelNotServed."""
    served = catalog.backend_name(name)
    return next((source.path for source in config.models if source.name == served), None)
