"""A loss that no server has: the right sum likelier, the one beside it unlikely.

Supervised fine-tuning says nothing about wrong answers. Here each sum comes with one that is off by
one, and the token where it goes wrong adds -log(1 - p), the unlikelihood loss of Welleck et al.
(1908.04319). The function is traced once. A server that takes losses (`--server-losses`) runs it in
one pass; with any other it runs here, behind a pass that computes the log-probabilities. dpo.py has
the other form, a loss over several sequences at once.
"""

# B sequences in a batch, T tokens of one sequence

import argparse
from dataclasses import replace
from typing import Any

from lib import options, tasks
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started
from sft import tokenize

try:
    import torch
except ModuleNotFoundError as package:
    options.end_without(package)

INPUT_RANKS = {"logprobs": 1, "wanted": 1, "unwanted": 1}
CERTAIN = 0.999  # of p, so that the loss of a wrong token is finite where the model is sure of it


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Teach a model by a loss of one's own.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 8, learning_rate=5e-4, save_every=4)
    arguments.add_argument("--batch-size", type=int, default=12, help="sums, each twice")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "custom_loss") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        base = options.sampling_client(start.service, base_model=args.model)
        split = tasks.sums()
        loss_fn = start.service.create_custom_loss(likely_and_unlikely, INPUT_RANKS).result()
        before = start.judge_before("before", base, split.held_out)

        progress = Progress("custom", args.steps)
        batches = tasks.batches(split.train, args.batch_size, args.seed)
        for step, problems_B in metrics.left(batches, args.steps):
            data = make_data(tinker, tokenizer, problems_B)
            backward = training.forward_backward_custom(data, loss_fn)
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            found = backward.result().metrics
            update.result()
            figures = {
                name: found[f"custom/{name}:sum"] for name in ("right", "beside", "p_beside")
            }
            metrics.add(step, loss=found["loss:sum"], **figures)
            progress.step(step, loss=found["loss:sum"], **figures)
            start.save_to_go_on(step)

        saving = start.save()
        sampler = training.save_weights_and_get_sampling_client().result()
        after = start.judge("after", sampler, split.held_out)
        chances = metrics.values("p_beside")
        print(f"chance of the sum beside: {chances[0]:.3f} -> {chances[-1]:.3f}", flush=True)
        path = path_of(saving)
        losses = metrics.values("loss")
        return Run("custom_loss", "loss of both answers (nats)", losses, None, before, after, path)


def likely_and_unlikely(
    logprobs: torch.Tensor, wanted: torch.Tensor, unwanted: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of one sequence; the server adds those of all up. wanted, unwanted (T - 1,): weights."""
    chances = torch.exp(logprobs)
    right = -(wanted * logprobs).sum()
    beside = -(unwanted * torch.log1p(-CERTAIN * chances)).sum()
    return right + beside, {
        "custom/right:sum": right,
        "custom/beside:sum": beside,
        "custom/p_beside:sum": (unwanted * chances).sum(),
    }


def make_data(tinker: Any, tokenizer: Any, problems_B: list[tasks.Problem]) -> list[Any]:
    """The right answer to each sum, and the one beside it. Weights make the loss the mean over
    answer tokens, and over wrong tokens."""
    right_B = [tokenize(tokenizer, problem) for problem in problems_B]
    beside_B = [tokenize(tokenizer, replace(p, result=p.result + 1)) for p in problems_B]
    num_answer_tokens = sum(sum(weights_T) for _, weights_T in right_B)
    data = []
    for (right_T, weights_T), (beside_T, _) in zip(right_B, beside_B, strict=True):
        differs = next(i for i, (a, b) in enumerate(zip(right_T, beside_T, strict=False)) if a != b)
        wanted_T = [weight / num_answer_tokens for weight in weights_T]
        unwanted_T = [float(i == differs) / len(problems_B) for i in range(len(beside_T))]
        data.append(make_datum(tinker, right_T, wanted_T, [0.0] * len(right_T)))
        data.append(make_datum(tinker, beside_T, [0.0] * len(beside_T), unwanted_T))
    return data


def make_datum(
    tinker: Any, tokens_T: list[int], wanted_T: list[float], unwanted_T: list[float]
) -> Any:
    """Position i predicts token i + 1. Inputs of one's own are tensors: no client knows their
    type."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens_T[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens_T[1:],
            "wanted": torch.tensor(wanted_T[1:]),
            "unwanted": torch.tensor(unwanted_T[1:]),
        },
    )


if __name__ == "__main__":
    options.main(run, parser())
