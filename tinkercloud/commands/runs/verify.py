"""`tinkercloud verify`: a receipt checked on one's own machine."""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from tinkercloud.commands.options import Arguments, say
from tinkercloud.commands.runs.options import (
    add_run_settings,
    engine,
    engine_config,
    place_of_base,
)
from tinkercloud.config import Config
from tinkercloud.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", type=Path, help="a file of `tinkercloud receipt`")
    parser.add_argument(
        "--weights", type=Path, help="the folder of the checkpoint that the receipt names"
    )
    add_run_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    """0: the same bits; 1: not."""
    from tinkercloud.services.runs.receipts import checked

    try:
        text = arguments["receipt"].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{arguments['receipt']} cannot be read: {error}") from None
    return asyncio.run(_verify(engine_config(arguments), checked(text), arguments["weights"]))


async def _verify(config: Config, receipt: dict[str, Any], weights: Path | None) -> int:
    from tinkercloud.services.runs.receipts import Base
    from tinkercloud.services.runs.verification import Verifier

    async with engine(config) as (backend, catalog):
        base = Base(
            receipt["base"]["name"], place_of_base(config, catalog, receipt["base"]["name"])
        )
        with tempfile.TemporaryDirectory(prefix="tinkercloud-") as scratch:
            result = await Verifier(backend, catalog, base, Path(scratch)).check(receipt, weights)
    say(str(result))
    return 0 if result.is_same else 1
