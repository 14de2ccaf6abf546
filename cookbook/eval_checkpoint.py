"""What training changed: held-out answers of the base model and of checkpoints, side by side.

Every model answers the same held-out problems of both tasks, four times each at temperature 1, with
the same seeds. Checkpoints are tinker:// paths as the other recipes print them.
"""

import argparse
import re
from typing import Any

from lib import options, tasks
from lib.evaluation import evaluate
from lib.progress import Progress
from lib.run import leave

TASKS = {"sums": tasks.sums, "comparisons": tasks.comparisons}
BASE = "base"


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Compare checkpoints with their base model.")
    arguments.add_argument(
        "checkpoints", nargs="+", help="tinker:// paths, of weights or of a state"
    )
    options.add_model(arguments)
    return arguments


def run(args: argparse.Namespace) -> None:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key) as service:
        base = options.sampling_client(service, base_model=args.model)
        tokenizer = base.get_tokenizer()
        names = [BASE, *args.checkpoints]
        progress = Progress("eval", len(names))
        table: dict[str, dict[str, float]] = {}
        for done, name in enumerate(names, 1):
            sampler = base if name == BASE else sampler_of(service, name)
            table[name] = {
                task: evaluate(
                    tinker, sampler, tokenizer, make().held_out[: args.held_out]
                ).accuracy
                for task, make in TASKS.items()
            }
            progress.step(done, **table[name])
    print("\n".join(rows(table)), flush=True)
    bars = dict(zip(labels(list(table)), table.values(), strict=True))
    leave(args.out, "eval_checkpoint", table, lambda plot, path: plot.draw_bars(path, bars))


def sampler_of(service: Any, path: str) -> Any:
    """Of weights that were saved to sample from, or of a state to train on."""
    if "/sampler_weights/" in path:
        return options.sampling_client(service, model_path=path)
    training = service.create_training_client_from_state(path).result()
    return training.save_weights_and_get_sampling_client().result()


def labels(names: list[str]) -> list[str]:
    """What a picture has room for: the last part of a path, and its run where another's is the
    same."""
    last = [name.rpartition("/")[2] for name in names]
    long = [re.sub("^tinker://([^:/]{8})[^:/]*", r"\1", name) for name in names]
    return [a if last.count(a) == 1 else b for a, b in zip(last, long, strict=True)]


def rows(table: dict[str, dict[str, float]]) -> list[str]:
    width = max(map(len, table))
    lines = [" ".join([" " * width, *(f"{task:>12}" for task in TASKS)])]
    for name, values in table.items():
        cells = (
            f"{value:>12.0%}"
            if name == BASE
            else f"{value:>5.0%} ({value - table[BASE][task]:+.0%})".rjust(12)
            for task, value in values.items()
        )
        lines.append(" ".join([name.ljust(width), *cells]))
    return lines


if __name__ == "__main__":
    options.main(run, parser())
