"""`tinkercloud branch`: a new model that goes on from an earlier step of a run."""

import argparse
import asyncio

from tinkercloud.commands.options import Arguments, say, say_progress
from tinkercloud.commands.runs.options import add_run_settings, engine, engine_config, opened
from tinkercloud.config import Config


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="a model's id, also of one that is no more")
    parser.add_argument("--step", type=int, required=True, help="of the optimizer, counted from 1")
    add_run_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    return asyncio.run(_branch(engine_config(arguments), arguments["run_id"], arguments["step"]))


async def _branch(config: Config, model_id: str, step: int) -> int:
    from tinkercloud.services.runs.branches import put_branch
    from tinkercloud.services.runs.replay import RunReplay, Verdict

    async with opened(config) as archive:
        kept = await archive.runs.find(model_id)
        until = await archive.runs.position_of_step(kept, step)
        verdict = Verdict()
        async with engine(config) as (backend, catalog):
            replay = RunReplay(backend, catalog, archive.runs)
            async for repeated in replay.repeat(kept, kept.nearest(until), until):
                verdict.add(repeated)
                if repeated.step is not None:
                    say_progress(f"step {repeated.step} of {step} is done again")
            if kept.nearest(until) is None or verdict.num_operations:
                say_progress(str(verdict))
            checkpoint = await put_branch(archive.database, archive.data_dir, backend, kept, step)
        say(checkpoint.tinker_path)
        say_progress("go on from it with create_training_client_from_state_with_optimizer")
        return 0
