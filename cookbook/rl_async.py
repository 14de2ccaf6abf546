"""Asynchronous reinforcement learning: trained on what older weights have sampled.

The comparisons of rl.py, but sampling does not wait for training: --lag batches are always
underway, so that what is trained on was sampled by weights of that many steps ago. The samples are
kept on record by the server, and each datum says which tokens of it are whose, as
`stable_reinforce` asks; its gradient stays bounded however far policy and sampler are apart.
"""

# P problems in a batch, G samples of each (a group), T tokens of one sequence

import argparse
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from lib import options, tasks
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started
from rl import ask, make_datum, rewards

REPORTED = ("ratio:max", "pg_clipfrac:mean")


@dataclass(frozen=True)
class Batch:
    """Samples that are underway. age: of the weights that draw them, in steps, once it is their
    turn to be trained on."""

    age: int
    problems_P: list[tasks.Problem]
    prompts_P_T: list[list[int]]
    futures_P: list[Any]


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Improve a model by a reward, without waiting for samples.")
    options.add_state(arguments)
    options.add_steps(arguments, 16, learning_rate=1e-4, save_every=4)
    arguments.add_argument("--lag", type=int, default=2, help="steps that samples are old")
    arguments.add_argument("--problems", type=int, default=12, help="per step")
    arguments.add_argument("--group-size", type=int, default=8, help="samples of each problem")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "rl_async") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        split = tasks.comparisons()
        sampler = publish(training).result()
        start.judge_before("before RL", sampler, split.held_out)

        progress = Progress("RL ", args.steps)
        left = metrics.left(tasks.batches(split.train, args.problems, args.seed), args.steps)
        underway: deque[Batch] = deque()
        for step in range(metrics.first_step + 1, args.steps + 1):
            while len(underway) <= args.lag and (following := next(left, None)) is not None:
                wanted_at, problems_P = following
                asked = ask(args, sampler, tokenizer, wanted_at, problems_P)
                underway.append(Batch(wanted_at - step, problems_P, *asked))
            batch = underway.popleft()
            samples_P_G = [future.result().sequences for future in batch.futures_P]
            rewards_P_G = rewards(tokenizer, batch.problems_P, samples_P_G)
            data = make_data(tinker, batch.prompts_P_T, samples_P_G, rewards_P_G)
            figures = {"reward": float(rewards_P_G.mean()), "age": batch.age}
            error = float(rewards_P_G.mean(axis=1).std() / len(batch.problems_P) ** 0.5)
            if data:  # there is nothing to learn where all groups are all right or all wrong
                backward = training.forward_backward(data, "stable_reinforce")
                update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                publication = publish(training)
                found = backward.result().metrics
                update.result()
                sampler = publication.result()
                figures |= {name.partition(":")[0]: found[name] for name in REPORTED}
            metrics.add(step, error=error, **figures)
            progress.step(step, **figures)
            start.save_to_go_on(step)

        saving = start.save()
        after = start.judge("after RL", sampler, split.held_out)
        path = path_of(saving)
        means, errors = metrics.values("reward"), metrics.values("error")
        return Run("rl_async", "mean reward", means, errors, metrics.before, after, path)


def publish(training: Any) -> Any:
    """A future of a sampler whose samples are kept on record."""
    return training.save_weights_and_get_sampling_client(record_stability_info=True)


def make_data(
    tinker: Any,
    prompts_P_T: list[list[int]],
    samples_P_G: list[list[Any]],
    rewards_P_G: np.ndarray,
) -> list[Any]:
    """As rl.py's, with the sample that each token is of."""
    advantages_P_G = rewards_P_G - rewards_P_G.mean(axis=1, keepdims=True)
    data = []
    for prompt_T, samples_G, advantages_G in zip(
        prompts_P_T, samples_P_G, advantages_P_G / advantages_P_G.size, strict=True
    ):
        for sample, advantage in zip(samples_G, advantages_G, strict=True):
            if advantage != 0:
                num_prompt, num_sampled = len(prompt_T), len(sample.tokens)
                datum = make_datum(tinker, prompt_T, sample, [float(advantage)] * num_sampled)
                data.append(
                    datum.with_provenance(
                        model_input=spans(tinker, sample, 0, num_prompt, num_sampled - 1),
                        loss_fn_inputs=spans(tinker, sample, 1, num_prompt - 1, num_sampled),
                    )
                )
    return data


def spans(tinker: Any, sample: Any, offset: int, num_prompt: int, num_sampled: int) -> list[Any]:
    """num_prompt tokens of the prompt from `offset` on, and then the first sampled ones."""
    name = sample.sequence_id
    return [
        tinker.PromptProvenanceSpan(sequence_id=name, offset=offset, length=num_prompt),
        tinker.SampledProvenanceSpan(sequence_id=name, offset=0, length=num_sampled),
    ]


if __name__ == "__main__":
    options.main(run, parser())
