"""`tinkercloud receipt`: what a sample or a step was computed from, for others to check."""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkercloud.commands.options import Arguments, say, say_progress
from tinkercloud.commands.runs.options import (
    Archive,
    add_run_settings,
    engine,
    engine_config,
    opened,
    place_of_base,
)
from tinkercloud.config import Config
from tinkercloud.errors import UserError

if TYPE_CHECKING:
    from tinkercloud.storage.futures import Sampled


NOT_NUMBERED = (
    "Answers of OpenAI's and Anthropic's APIs have no number in a sampling session and are not "
    "kept once they are sent, so they get no receipt"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", metavar="SAMPLER|RUN", help="a sampling session, or a model in training"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--sample", type=int, help="of the sampling session, by its seq_id")
    what.add_argument("--step", type=int, help="of the run's optimizer, counted from 1")
    parser.add_argument(
        "--weights",
        type=Path,
        help="a folder to make, for the weights that who checks the receipt will need",
    )
    add_run_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    weights = arguments["weights"]
    if weights is not None and weights.exists():
        raise UserError(f"{weights} is there already; name a folder that is not")
    receipt = asyncio.run(_receipt(engine_config(arguments), arguments))
    say(json.dumps(receipt))
    return 0


async def _receipt(config: Config, arguments: Arguments) -> dict[str, Any]:
    from tinkercloud.services.runs.receipts import (
        Base,
        Workshop,
        receipt_of_sample,
        receipt_of_step,
    )

    async with opened(config) as archive:
        subject: str = arguments["subject"]
        step: int = arguments["step"] or 0
        kept = await archive.runs.find(subject) if step else None
        sampled = None if step else await _sampled(archive, subject, arguments["sample"])
        async with engine(config) as (backend, catalog):
            with tempfile.TemporaryDirectory(prefix="tinkercloud-") as scratch:
                workshop = Workshop(
                    backend, catalog, archive.runs, Path(scratch), arguments["weights"]
                )
                say_progress("computing it again")
                if kept is not None:
                    name = kept.model.base_model
                    base = Base(name, place_of_base(config, catalog, name))
                    return await receipt_of_step(workshop, base, kept, step)
                assert sampled is not None, "one of both was asked for"
                name = (await archive.runs.sampler(sampled)).base_model
                base = Base(name, place_of_base(config, catalog, name))
                return await receipt_of_sample(workshop, base, sampled)


async def _sampled(archive: Archive, sampler_id: str, number: int) -> "Sampled":
    sampled = await archive.runs.sample(sampler_id, number)
    if sampled is None:
        raise UserError(
            f"no sample {number} of the sampling session {sampler_id} is kept: it failed, or was "
            f"finished longer ago than result_ttl_s, or there was none. {NOT_NUMBERED}"
        )
    return sampled
