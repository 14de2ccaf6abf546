"""Kill the server in the middle of a run; the curve goes on as if nothing had happened.

Starts a server of its own, trains the same adapter twice with the same data, and in the second run
ends the server with SIGKILL while a step is underway. It is started again on the same data folder;
the loop below knows nothing of all this. Losses and sampled answers of both runs are compared to
the last bit.
"""

import argparse
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from demo import Running, end_process, fetch_model
from lib import interrupts, options, tasks
from lib.evaluation import evaluate
from lib.metrics import Metrics
from lib.progress import Progress
from lib.run import leave
from sft import make_data, tokenize

UNDERWAY_S = 1.0  # after which the server has the step, and computes it


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Kill the server during a run.")
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--kill-at", type=int, default=4, help="the step that is underway")
    arguments.add_argument("--batch-size", type=int, default=12)
    arguments.add_argument("--learning-rate", type=float, default=5e-4)
    arguments.add_argument("--rank", type=int, default=8, help="of the LoRA adapter")
    arguments.set_defaults(base_url=None, api_key="of its own server")
    return arguments


def run(args: argparse.Namespace) -> None:
    interrupts.remember_signals()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tinkercloud-kill-") as scratch,
            Running.start(Path(scratch), fetch_model()) as server,
        ):
            both = interrupts.run(lambda: train_twice(args, server))
    except interrupts.Interrupted as ended:
        end_process(ended.status)
    (plain, plain_answers), (killed, killed_answers) = both
    is_same = killed == plain and killed_answers == plain_answers
    print(
        "every loss and every answer is the same, to the last bit"
        if is_same
        else "the runs differ",
        flush=True,
    )
    leave(
        args.out,
        "resume_after_kill",
        {"plain": plain, "killed": killed, "is_same": is_same},
        lambda plot, path: plot.draw_kill(path, plain, killed, args.kill_at),
    )
    if not is_same:
        raise options.RecipeError("the run with a kill is not the one without")


def train_twice(args: argparse.Namespace, server: Running) -> list[tuple[list[float], list[Any]]]:
    print("a run without a kill", flush=True)
    plain = train(args, server, None)
    print(f"the same run, and SIGKILL to the server in step {args.kill_at}", flush=True)
    return [plain, train(args, server, args.kill_at)]


def train(
    args: argparse.Namespace, server: Running, kill_at: int | None
) -> tuple[list[float], list[Any]]:
    """Losses of all steps, and answers to held-out problems at the end."""
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    metrics = Metrics(args.out, "plain" if kill_at is None else "killed")
    with tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key) as service:
        training = service.create_lora_training_client(
            options.MODEL, rank=args.rank, seed=args.seed
        ).result()
        tokenizer = training.get_tokenizer()
        split = tasks.sums()
        batches = tasks.batches(split.train, args.batch_size, args.seed)
        progress = Progress("SFT", args.steps)
        for step in range(1, args.steps + 1):
            data_B = make_data(tinker, [tokenize(tokenizer, problem) for problem in next(batches)])
            backward = training.forward_backward(data_B, "cross_entropy")
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            if step == kill_at:
                time.sleep(UNDERWAY_S)
                server.kill(signal.SIGKILL)
                print("killed; starting it again on the same data", flush=True)
                server.restart()
            loss = backward.result().metrics["loss:sum"]
            update.result()
            metrics.add(step, loss=loss)
            progress.step(step, loss=loss)
        sampler = training.save_weights_and_get_sampling_client().result()
        found = evaluate(tinker, sampler, tokenizer, split.held_out[: args.held_out])
        return metrics.values("loss"), found.examples


if __name__ == "__main__":
    options.main(run, parser())
