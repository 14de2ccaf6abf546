"""Supervised fine-tuning: show the model one-digit sums with their answers as JSON.

Before, SmolLM2 chats about "3 + 4"; after eight steps it answers {"answer": 7}, also for sums that
it was never shown. The weights are saved; rl.py goes on from them.
"""

# B sequences in a batch, T tokens of one sequence

import argparse

from lib import chat, options, tasks
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Teach a model by examples.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 8, learning_rate=5e-4, save_every=4)
    arguments.add_argument("--batch-size", type=int, default=16)
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "sft") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        base = options.sampling_client(start.service, base_model=args.model)
        split = tasks.sums()
        before = start.judge_before("before SFT", base, split.held_out)

        progress = Progress("SFT", args.steps)
        batches = tasks.batches(split.train, args.batch_size, args.seed)
        for step, problems_B in metrics.left(batches, args.steps):
            examples_B_T = [tokenize(tokenizer, problem) for problem in problems_B]
            data_B = make_data(tinker, examples_B_T)
            # Both are sent before either is waited for: the server is never idle in between.
            backward = training.forward_backward(data_B, "cross_entropy")
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            loss = backward.result().metrics["loss:sum"]
            update.result()
            metrics.add(step, loss=loss)
            progress.step(step, loss=loss)
            start.save_to_go_on(step)

        saving = start.save()
        sampler = training.save_weights_and_get_sampling_client().result()
        after = start.judge("after SFT", sampler, split.held_out)
        losses = metrics.values("loss")
        return Run(
            "sft", "loss per answer token (nats)", losses, None, before, after, path_of(saving)
        )


def tokenize(tokenizer: object, problem: tasks.Problem) -> tuple[list[int], list[float]]:
    """(tokens_T, weights_T) of a question and its right answer."""
    return chat.example(tokenizer, problem.question, problem.answer)


def make_data(tinker: object, examples_B_T: list[tuple[list[int], list[float]]]) -> list[object]:
    """The server adds up weighted token losses, so weights that sum to one make their mean."""
    num_answer_tokens = sum(sum(weights_T) for _, weights_T in examples_B_T)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens_T[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens_T[1:],
                "weights": [weight / num_answer_tokens for weight in weights_T[1:]],
            },
        )
        for tokens_T, weights_T in examples_B_T
    ]


if __name__ == "__main__":
    options.main(run, parser())
