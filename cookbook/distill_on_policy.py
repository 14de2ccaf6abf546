"""On-policy distillation: the student writes, the teacher says how likely it finds each token.

No reward and no right answer: a token's advantage is by how many nats more the teacher would have
expected it than the student did, so that the loss is the reverse KL divergence from teacher to
student, on what the student itself writes (Agarwal et al. 2306.13649). The student is what sft.py
saved, which has never seen a comparison; the teacher is what rl.py made of it.
"""

# P problems in a batch, G samples of each, T tokens of one sequence

import argparse
from typing import Any

from eval_checkpoint import sampler_of
from lib import options, tasks
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started
from rl import ask, make_datum


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Teach a model by another one's opinion of its answers.")
    options.add_state(arguments)
    arguments.add_argument("teacher", help="tinker://..., printed by rl.py")
    options.add_steps(arguments, 8, learning_rate=3e-4, save_every=4)
    arguments.add_argument("--problems", type=int, default=24, help="per step")
    arguments.add_argument("--group-size", type=int, default=4, help="samples of each problem")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "distill_on_policy") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        teacher = sampler_of(start.service, args.teacher)
        split = tasks.comparisons()
        sampler = training.save_weights_and_get_sampling_client().result()
        start.judge_before("the student before", sampler, split.held_out)
        start.judge("the teacher", teacher, split.held_out)

        progress = Progress("distilling", args.steps)
        batches = tasks.batches(split.train, args.problems, args.seed)
        for step, problems_P in metrics.left(batches, args.steps):
            prompts_P_T, futures_P = ask(args, sampler, tokenizer, step, problems_P)
            written = [
                (prompt_T, sample)
                for prompt_T, future in zip(prompts_P_T, futures_P, strict=True)
                for sample in future.result().sequences
            ]
            data, divergence = make_data(tinker, teacher, written)
            # All three are sent before the first is waited for.
            backward = training.forward_backward(data, "importance_sampling")
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            publication = training.save_weights_and_get_sampling_client()
            backward.result()
            update.result()
            sampler = publication.result()
            metrics.add(step, divergence=divergence)
            progress.step(step, divergence=divergence)
            start.save_to_go_on(step)

        saving = start.save()
        after = start.judge("the student afterwards", sampler, split.held_out)
        path = path_of(saving)
        values, measure = metrics.values("divergence"), "divergence from the teacher (nats a token)"
        return Run("distill_on_policy", measure, values, None, metrics.before, after, path)


def make_data(
    tinker: Any, teacher: Any, written: list[tuple[list[int], Any]]
) -> tuple[list[Any], float]:
    """Data whose loss is a mean over samples, and the student's divergence: the mean of its
    log-probabilities less the teacher's, over all sampled tokens. written: prompts and samples."""
    futures = [
        teacher.compute_logprobs(tinker.ModelInput.from_ints(prompt_T + list(sample.tokens)))
        for prompt_T, sample in written
    ]
    data, gains = [], []
    for (prompt_T, sample), future in zip(written, futures, strict=True):
        expected_T = future.result()[len(prompt_T) :]
        gains_T = [
            by_teacher - by_student
            for by_teacher, by_student in zip(expected_T, sample.logprobs, strict=True)
        ]
        gains += gains_T
        data.append(make_datum(tinker, prompt_T, sample, [g / len(written) for g in gains_T]))
    return data, -sum(gains) / len(gains)


if __name__ == "__main__":
    options.main(run, parser())
