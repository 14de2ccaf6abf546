"""Direct preference optimisation: of two answers to a sum, JSON is preferred to a sentence.

SmolLM2 prefers to chat. A step takes pairs of answers, and makes the preferred one likelier than
the other by more than it was for the base model (Rafailov et al. 2305.18290). That alone may make
both less likely than anything else, so the preferred answer's own loss is added (as Pang et al.
2404.19733; try `--nll-weight 0`). The loss is written and differentiated here, by
`forward_backward_custom`; the server computes the passes.
"""

# P pairs in a batch, T tokens of one sequence

import argparse
from dataclasses import dataclass
from typing import Any

from lib import chat, options, tasks
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started

try:
    import torch
    from torch.nn.functional import logsigmoid
except ModuleNotFoundError as package:
    options.end_without(package)


@dataclass(frozen=True)
class Answered:
    """A sequence with its answer's log-probability by the base model. num_prompt: tokens that are
    not the answer's."""

    tokens_T: list[int]
    num_prompt: int
    reference: float


Pair = tuple[Answered, Answered]
"""The preferred answer first."""


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Teach a model by preferences.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 12, learning_rate=5e-4, save_every=4)
    arguments.add_argument("--pairs", type=int, default=8, help="per step")
    arguments.add_argument("--beta", type=float, default=0.1, help="weight of a log-ratio")
    arguments.add_argument(
        "--nll-weight", type=float, default=1.0, help="of the preferred answer's loss per token"
    )
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "dpo") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        base = options.sampling_client(start.service, base_model=args.model)
        split = tasks.sums()
        held_out_pairs = make_pairs(tinker, base, tokenizer, split.held_out[: args.held_out])
        before = start.judge_before("before DPO", base, split.held_out)

        progress = Progress("DPO", args.steps)
        batches = tasks.batches(split.train, args.pairs, args.seed)
        for step, problems_P in metrics.left(batches, args.steps):
            pairs_P = make_pairs(tinker, base, tokenizer, problems_P)
            loss_fn = preference_loss(pairs_P, args.beta, args.nll_weight)
            backward = training.forward_backward_custom(make_data(tinker, pairs_P), loss_fn)
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            found = backward.result().metrics
            update.result()
            metrics.add(step, loss=found["loss"], margin=found["margin"], nll=found["nll"])
            progress.step(step, loss=found["loss"], margin=found["margin"], nll=found["nll"])
            start.save_to_go_on(step)

        saving = start.save()
        preferred = share_preferred(tinker, training, held_out_pairs)
        sampler = training.save_weights_and_get_sampling_client().result()
        after = start.judge("after DPO", sampler, split.held_out)
        print(f"{preferred:.0%} of the held-out pairs are further apart than they were", flush=True)
        path = path_of(saving)
        losses = metrics.values("loss")
        return Run("dpo", "preference loss per pair (nats)", losses, None, before, after, path)


def make_pairs(tinker: Any, base: Any, tokenizer: Any, problems: list[tasks.Problem]) -> list[Pair]:
    """All are sent to the server before the first is waited for."""
    sequences, futures = [], []
    for problem in problems:
        prompt_T = chat.prompt_tokens(tokenizer, problem.question)
        for answer in (problem.answer, f"{problem.question} is {problem.result}."):
            tokens_T = prompt_T + chat.answer_tokens(tokenizer, answer)
            sequences.append((tokens_T, len(prompt_T)))
            futures.append(base.compute_logprobs(tinker.ModelInput.from_ints(tokens_T)))
    answered = [
        Answered(tokens_T, num_prompt, sum(future.result()[num_prompt:]))
        for (tokens_T, num_prompt), future in zip(sequences, futures, strict=True)
    ]
    return list(zip(answered[::2], answered[1::2], strict=True))


def make_data(tinker: Any, pairs_P: list[Pair]) -> list[Any]:
    """Two data for each pair, one after the other."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(each.tokens_T[:-1]),
            loss_fn_inputs={
                "target_tokens": each.tokens_T[1:],
                "weights": [1.0] * (len(each.tokens_T) - 1),
            },
        )
        for pair in pairs_P
        for each in pair
    ]


def preference_loss(pairs_P: list[Pair], beta: float, nll_weight: float) -> Any:
    def loss_fn(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        """logprobs (T - 1,) of each sequence: of its tokens from the second on."""
        margins_P = beta * torch.stack(log_ratio_differences(pairs_P, logprobs))
        preference = -logsigmoid(margins_P).mean()
        answers = [
            logprobs_T[better.num_prompt - 1 :]
            for (better, _), logprobs_T in zip(pairs_P, logprobs[::2], strict=True)
        ]
        nll = -torch.cat(answers).mean()
        figures = {"loss": preference, "margin": margins_P.mean(), "nll": nll}
        return preference + nll_weight * nll, {k: v.item() for k, v in figures.items()}

    return loss_fn


def log_ratio_differences(pairs_P: list[Pair], logprobs: list[Any]) -> list[Any]:
    """By how much more than for the base model the preferred answer is the likelier, in nats."""
    ratios = [
        logprobs_T[each.num_prompt - 1 :].sum() - each.reference
        for each, logprobs_T in zip((e for pair in pairs_P for e in pair), logprobs, strict=True)
    ]
    return [better - worse for better, worse in zip(ratios[::2], ratios[1::2], strict=True)]


def share_preferred(tinker: Any, training: Any, pairs: list[Pair]) -> float:
    """Of the pairs, those whose preferred answer gained on the other one."""
    outputs = training.forward(make_data(tinker, pairs), "cross_entropy").result().loss_fn_outputs
    logprobs = [torch.as_tensor(output["logprobs"].to_numpy()) for output in outputs]
    differences = log_ratio_differences(pairs, logprobs)
    return sum(float(difference) > 0 for difference in differences) / len(differences)


if __name__ == "__main__":
    options.main(run, parser())
