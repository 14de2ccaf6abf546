"""`tinkercloud import`: make an adapter of PEFT or MLX-LM a checkpoint of this server."""

import argparse
from pathlib import Path

from tinkercloud.commands.options import Arguments, add_settings


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "adapter_dir",
        type=Path,
        help="with adapter_config.json and adapter_model.safetensors or adapters.safetensors",
    )
    parser.add_argument(
        "--base-model", required=True, metavar="NAME", help="the served model that it adapts"
    )
    parser.add_argument("--user", default="default", help="whose checkpoint it becomes [default]")
    parser.add_argument("--name", default="imported", help="of the checkpoint [imported]")
    add_settings(parser, ["data_dir", "models"])
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud.commands import import_adapter  # it needs torch

    return import_adapter.run(arguments)
