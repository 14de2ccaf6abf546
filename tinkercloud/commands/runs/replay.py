"""`tinkercloud replay`: a run computed again, and held against what is on record of it."""

import argparse
import asyncio

from tinkercloud.commands.options import Arguments, say
from tinkercloud.commands.runs.options import add_run_settings, engine, engine_config, opened
from tinkercloud.config import Config


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="a model's id, also of one that is no more")
    parser.add_argument("--step", type=int, help="up to this step of the optimizer [all]")
    parser.add_argument(
        "--nearest",
        action="store_true",
        help="begin with the last snapshot before the step, not with the first one that is kept",
    )
    parser.add_argument(
        "--list", action="store_true", help="only say which steps are kept, without computing"
    )
    add_run_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    return asyncio.run(_replay(engine_config(arguments), arguments))


async def _replay(config: Config, arguments: Arguments) -> int:
    """0: every operation gave the bits on record; 1: not."""
    from tinkercloud.services.runs.replay import RunReplay, Verdict

    async with opened(config) as archive:
        kept = await archive.runs.find(arguments["run_id"])
        say(str(kept))
        step = arguments["step"]
        until = kept.run.last
        if step is not None:
            until = await archive.runs.position_of_step(kept, step)
        for snapshot in kept.snapshots:
            say(f"snapshot after step {snapshot.num_steps}, operation {snapshot.position}")
        if arguments["list"]:
            return 0
        beginning = kept.nearest(until - 1) if arguments["nearest"] else kept.beginning
        verdict = Verdict()
        async with engine(config) as (backend, catalog):
            replay = RunReplay(backend, catalog, archive.runs)
            async for repeated in replay.repeat(kept, beginning, until):
                verdict.add(repeated)
                operation = repeated.operation
                name = f"operation {operation.position} ({operation.kind})"
                if not repeated.agrees:
                    say(f"{name}: other bits than on record")
                if repeated.step is not None:
                    say(f"step {repeated.step}: {verdict}")
        say(str(verdict))
        return 1 if verdict.num_different else 0
