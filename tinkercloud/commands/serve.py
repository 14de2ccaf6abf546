"""`tinkercloud serve`: the server, from its socket to its first key."""

import argparse
import asyncio
import importlib
import importlib.util
import logging
import shlex
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from tinkercloud import logs
from tinkercloud.commands.options import (
    EXTRAS,
    Arguments,
    add_settings,
    check_backend,
    config_of,
    say,
    with_models,
)
from tinkercloud.config import Config
from tinkercloud.errors import ConfigError

if TYPE_CHECKING:
    from tinkercloud.core.types import ServedModel
    from tinkercloud.services.container import Services

ANY_KEY = "tml-local"  # the official client insists on a key even where the server does not


def add_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    # Here, because the other commands need no web server.
    from tinkercloud import server

    config = config_of(arguments)
    check_backend(config)
    _check_extra(config)
    logs.configure(config.log_level, config.log_format)
    logging.getLogger("aiosqlite").setLevel(logging.INFO)  # below, it tells values: prompts, data
    with closing(server.listen(config)) as listener, server.sole_owner(config.data_dir):
        url = server.base_url(listener)
        config = with_models(config)
        for model in config.models:
            say(f"serving {model.name} from {model.path}")
        for alias in config.aliases:
            say(f"serving {alias.served} as {alias.name} too")
        say(f"data in {config.data_dir}")
        from tinkercloud.app import create_app

        app = create_app(config)
        hooks = server.Hooks(
            ready=lambda: _serve(config, url, app.state.services),
            stopping=lambda drain: app.state.services.stop_work(drain=drain),
        )
        server.run(app, config, listener, hooks)
    return 0


def _check_extra(config: Config) -> None:
    """Before anything is bound or made: the engine is another process, and its log is no place to
    look for a missing package. Raises ConfigError, ModuleNotFoundError."""
    needed = {"embedded": ("embedded",), "cluster": ("embedded", "cluster")}
    packages = [name for extra in needed.get(config.backend, ()) for name in EXTRAS[extra]]
    if config.otlp_endpoint is not None:
        importlib.import_module("tinkercloud.services.observability.span_export")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the {config.backend} backend needs {', '.join(missing)}, not installed here: "
            f"pip install 'tinkercloud[{config.backend}]'"
        )


async def _serve(config: Config, url: str, services: "Services") -> None:
    """Raises ConfigError where the weights cannot be loaded. Clients of an earlier server need not
    wait for them; but a first key that is shown above an error would be lost."""
    if config.auth and not await asyncio.to_thread(_keys_exist, config):
        await services.backend.loaded()
    await _welcome(config, url, services.catalog)
    await services.backend.loaded()


async def _welcome(config: Config, url: str, served: "Iterable[ServedModel]") -> None:
    from tinkercloud.services.chats import tokenizer_hub

    home = config.data_dir.absolute() / tokenizer_hub.FOLDER
    if await asyncio.to_thread(tokenizer_hub.write_hub, home, served):
        say("for clients without a model hub, the tokenizers of the served models:")
        say(f"export HF_HOME={shlex.quote(str(home))}\nexport HF_HUB_OFFLINE=1")
    # In a thread: the server's own writer, on this loop, may hold the database.
    key = await asyncio.to_thread(_first_key, config) if config.auth else ANY_KEY
    if key is None:
        folder = shlex.quote(str(config.data_dir))
        say(f"keys exist already; another one: tinkercloud keys add --data-dir {folder}")
        say(f"export TINKER_BASE_URL={url}")
    else:
        if config.auth:
            say("a first API key was made; it is shown this once and kept as a hash only:")
        say(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={key}")
    say(f"ready: {url}")


def _keys_exist(config: Config) -> bool:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config.data_dir)) as keys:
        return bool(keys.list())


def _first_key(config: Config) -> str | None:
    from tinkercloud.storage.keys import KeyStore

    with closing(KeyStore(config.data_dir)) as keys:
        return keys.ensure_first_key()
