"""Supervised fine-tuning: show the model one-digit sums with their answers as JSON.

Before, SmolLM2 chats about "3 + 4"; after eight steps it answers {"answer": 7}, also for sums that
it was never shown. The weights are saved; rl.py goes on from them.
"""

# B sequences in a batch, T tokens of one sequence

import argparse

from lib import chat, options, tasks
from lib.evaluation import evaluate
from lib.metrics import Metrics
from lib.progress import Progress, show
from lib.run import Run


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Teach a model by examples.")
    options.add_model(arguments)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--batch-size", type=int, default=16)
    arguments.add_argument("--learning-rate", type=float, default=5e-4)
    arguments.add_argument("--rank", type=int, default=16, help="of the LoRA adapter")
    arguments.add_argument("--save-every", type=int, default=4, help="steps, to go on from")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    metrics = Metrics(args.out, "sft")
    with tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key) as service:
        training = options.begin(service, args, metrics)
        tokenizer = training.get_tokenizer()
        base = options.sampling_client(service, base_model=args.model)
        split = tasks.sums()
        held_out = split.held_out[: args.held_out]

        before = evaluate(tinker, base, tokenizer, held_out)
        show("before SFT", before)

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
            if step % args.save_every == 0:
                metrics.saved(step, training.save_state(f"sft-{step}").result().path)

        saving = training.save_state("sft")
        sampler = training.save_weights_and_get_sampling_client().result()
        after = evaluate(tinker, sampler, tokenizer, held_out)
        show("after SFT", after)
        path = saving.result().path
        print(f"weights: {path}", flush=True)
        losses = metrics.values("loss")
        return Run("sft", "loss per answer token (nats)", losses, None, before, after, path)


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
