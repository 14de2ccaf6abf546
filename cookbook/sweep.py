"""Eight learning rates at once on one base model: eight adapters, trained side by side.

Each step of all eight is sent before any is waited for, so that the server computes them in common
batches: the base model's weights are read once for all of them. The picture has eight curves, and
the loss that each rate ends with.
"""

# B sequences in a batch, R learning rates, S steps

import argparse
import time
from typing import Any

from lib import options, tasks
from lib.metrics import Metrics
from lib.progress import Progress
from lib.run import leave
from sft import make_data, tokenize

RATES = (1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 1e-2)
NUM_LAST = 3  # steps whose mean loss a rate is judged by


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Find a learning rate.")
    options.add_model(arguments)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--batch-size", type=int, default=8)
    arguments.add_argument("--rank", type=int, default=8, help="of each LoRA adapter")
    arguments.add_argument("--save-every", type=int, default=5, help="steps, to go on from")
    arguments.add_argument("--rates", type=float, nargs="+", default=RATES)
    return arguments


def run(args: argparse.Namespace) -> None:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    metrics = Metrics(args.out, "sweep")
    with tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key) as service:
        models_R = training_clients(service, args, metrics)
        tokenizer = models_R[0].get_tokenizer()
        progress = Progress("sweep", args.steps)
        batches = tasks.batches(tasks.sums().train, args.batch_size, args.seed)
        start_s = time.monotonic()
        for step, problems_B in metrics.left(batches, args.steps):
            data_B = make_data(tinker, [tokenize(tokenizer, problem) for problem in problems_B])
            sent_R = [
                (
                    model.forward_backward(data_B, "cross_entropy"),
                    model.optim_step(tinker.AdamParams(learning_rate=rate)),
                )
                for model, rate in zip(models_R, args.rates, strict=True)
            ]
            losses_R = []
            for backward, update in sent_R:
                losses_R.append(backward.result().metrics["loss:sum"])
                update.result()
            metrics.add(step, losses=losses_R)
            progress.step(step, best=min(losses_R), worst=max(losses_R))
            if step % args.save_every == 0:
                saving_R = [model.save_state(f"sweep-{step}") for model in models_R]
                metrics.saved(step, [saving.result().path for saving in saving_R])
    seconds = time.monotonic() - start_s
    report(args, metrics, seconds)


def training_clients(service: Any, args: argparse.Namespace, metrics: Metrics) -> list[Any]:
    """Of new adapters, or of those that an earlier run saved."""
    if metrics.state is None:
        creating_R = [
            service.create_lora_training_client(args.model, rank=args.rank, seed=args.seed)
            for _ in args.rates
        ]
    else:
        if len(metrics.state) != len(args.rates):
            raise options.RecipeError(f"--out: the run there has {len(metrics.state)} rates")
        creating_R = [
            service.create_training_client_from_state_with_optimizer(path) for path in metrics.state
        ]
    return [creating.result() for creating in creating_R]


def report(args: argparse.Namespace, metrics: Metrics, seconds: float) -> None:
    losses_S_R = metrics.values("losses")
    curves = {rate: [losses_R[i] for losses_R in losses_S_R] for i, rate in enumerate(args.rates)}
    ends = {rate: sum(losses[-NUM_LAST:]) / NUM_LAST for rate, losses in curves.items()}
    for rate, end in ends.items():
        print(f"learning rate {rate:g}: {end:.3f} nats in the last {NUM_LAST} steps", flush=True)
    best = min(ends, key=lambda rate: ends[rate])
    print(f"best: {best:g}; {len(curves)} rates in {seconds:.0f} s", flush=True)
    figures = {"ends": ends, "best": best}
    leave(args.out, "sweep", figures, lambda plot, path: plot.draw_sweep(path, curves, ends))


if __name__ == "__main__":
    options.main(run, parser())
