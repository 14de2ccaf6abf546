"""Reinforcement learning: "Which is larger, 37 or 52?", and a reward for the right answer.

The model starts from what sft.py saved: it knows the form of an answer from sums, but is never
shown an answer to a question like this. It samples a group of answers to each problem; an answer's
advantage is its reward minus the mean of its group (GRPO without division by the deviation), and
the importance_sampling loss makes the better ones likelier.
"""

# P problems in a batch, G samples of each (a group), T tokens of one sequence

import argparse
from typing import Any

import numpy as np
from lib import chat, options, tasks
from lib.evaluation import MAX_TOKENS
from lib.progress import Progress
from lib.run import Run
from lib.start import path_of, started

MAX_STEPS = 2**20  # seeds of runs with other --seed begin there


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Improve a model by a reward.")
    options.add_state(arguments)
    options.add_steps(arguments, 10, learning_rate=3e-4, save_every=5)
    arguments.add_argument("--problems", type=int, default=12, help="per step")
    arguments.add_argument("--group-size", type=int, default=8, help="samples of each problem")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "rl") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        split = tasks.comparisons()
        sampler = training.save_weights_and_get_sampling_client().result()
        start.judge_before("before RL", sampler, split.held_out)

        progress = Progress("RL ", args.steps)
        batches = tasks.batches(split.train, args.problems, args.seed)
        for step, problems_P in metrics.left(batches, args.steps):
            prompts_P_T, futures_P = ask(args, sampler, tokenizer, step, problems_P)
            samples_P_G = [future.result().sequences for future in futures_P]
            rewards_P_G = rewards(tokenizer, problems_P, samples_P_G)
            advantages_P_G = rewards_P_G - rewards_P_G.mean(axis=1, keepdims=True)
            data = make_data(tinker, prompts_P_T, samples_P_G, advantages_P_G)
            loss = 0.0
            if data:  # there is nothing to learn where all groups are all right or all wrong
                # All three are sent before the first is waited for.
                backward = training.forward_backward(data, "importance_sampling")
                update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                publication = training.save_weights_and_get_sampling_client()
                loss = backward.result().metrics["loss:sum"]
                update.result()
                sampler = publication.result()
            reward = float(rewards_P_G.mean())
            error = float(rewards_P_G.mean(axis=1).std() / len(problems_P) ** 0.5)
            metrics.add(step, reward=reward, error=error, loss=loss)
            progress.step(step, reward=reward, loss=loss)
            start.save_to_go_on(step)

        saving = start.save()
        after = start.judge("after RL", sampler, split.held_out)
        path = path_of(saving)
        means, errors = metrics.values("reward"), metrics.values("error")
        return Run("rl", "mean reward", means, errors, metrics.before, after, path)


def ask(
    args: argparse.Namespace, sampler: Any, tokenizer: Any, step: int, problems: list[tasks.Problem]
) -> tuple[list[list[int]], list[Any]]:
    """The problems' prompts, and a future of G samples of each. Every problem of every step has a
    seed of its own, so that a run can be repeated."""
    prompts_P_T = [chat.prompt_tokens(tokenizer, problem.question) for problem in problems]
    first_seed = (args.seed * MAX_STEPS + step - 1) * args.problems
    futures_P = [
        sampler.sample(
            prompt=args.sdk.ModelInput.from_ints(prompt_T),
            num_samples=args.group_size,
            sampling_params=args.sdk.SamplingParams(max_tokens=MAX_TOKENS, seed=first_seed + i),
        )
        for i, prompt_T in enumerate(prompts_P_T)
    ]
    return prompts_P_T, futures_P


def rewards(
    tokenizer: Any, problems_P: list[tasks.Problem], samples_P_G: list[list[Any]]
) -> np.ndarray:
    """rewards_P_G: 1 for the right JSON object, 0 for anything else."""
    return np.array(
        [
            [tasks.grade(problem, chat.answer_text(tokenizer, s.tokens)) for s in samples_G]
            for problem, samples_G in zip(problems_P, samples_P_G, strict=True)
        ]
    )


def make_data(
    tinker: Any,
    prompts_P_T: list[list[int]],
    samples_P_G: list[list[Any]],
    advantages_P_G: np.ndarray,
) -> list[Any]:
    """Advantages are divided by P * G, so that the loss is a mean over samples.

    Samples without advantage add nothing to the gradient and are left out.
    """
    return [
        make_datum(tinker, prompt_T, sample, [advantage / advantages_P_G.size] * len(sample.tokens))
        for prompt_T, samples_G, advantages_G in zip(
            prompts_P_T, samples_P_G, advantages_P_G, strict=True
        )
        for sample, advantage in zip(samples_G, advantages_G, strict=True)
        if advantage != 0
    ]


def make_datum(tinker: Any, prompt_T: list[int], sample: Any, advantages: list[float]) -> Any:
    """advantages: of the sampled tokens. Position i predicts token i + 1: the prompt's positions
    but its last get advantage 0."""
    tokens_T = prompt_T + list(sample.tokens)
    unscored = [0.0] * (len(prompt_T) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens_T[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens_T[1:],
            "logprobs": unscored + list(sample.logprobs),
            "advantages": unscored + advantages,
        },
    )


if __name__ == "__main__":
    options.main(run, parser())
