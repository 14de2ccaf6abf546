"""`tinkercloud diff`: the first operation in which two runs differ."""

import argparse
import asyncio

from tinkercloud.commands.options import Arguments, config_of, say
from tinkercloud.commands.runs.options import add_run_settings, opened
from tinkercloud.config import Config


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", help="a model's id, also of one that is no more")
    parser.add_argument("run_b", metavar="RUN_B", help="another one")
    add_run_settings(parser, engine=False)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    return asyncio.run(_diff(config_of(arguments), arguments["run_a"], arguments["run_b"]))


async def _diff(config: Config, run_a: str, run_b: str) -> int:
    """0: all that both keep is the same; 1: not."""
    from tinkercloud.services.runs.differences import compare

    async with opened(config) as archive:
        pair = [await archive.runs.find(name) for name in (run_a, run_b)]
        for kept in pair:
            say(str(kept))
        comparison = await compare(archive.runs, *pair)
        say(f"from step {comparison.from_step} on, {comparison.num_equal} operations are the same")
        difference = comparison.difference
        if difference is None:
            say("no operation differs")
            return 0
        for kept, operation in zip(pair, difference.of, strict=True):
            if operation is None:
                say(f"{kept.run.model_id}: ends there")
            else:
                say(
                    f"{kept.run.model_id}: operation {operation.position} ({operation.kind}, "
                    f"seq_id {operation.seq_id}), step {difference.step}"
                )
        say(f"first difference: {difference.what}")
        return 1
