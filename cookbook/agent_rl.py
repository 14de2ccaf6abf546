"""Train an agent as it is: a shop assistant on the plain `openai` package, and its tool.

The agent (agents/shop.py) knows nothing of this: its base URL leads into a capture session, which
keeps the tokens of every turn. Several episodes of the same question are a group; an episode's
reward is posted to the session, which hands the trajectories back as datums with group-centred
advantages. A 135M model never calls a tool by itself, so a few steps of supervised fine-tuning show
it how a call is written; what to do with the tool's answer it learns by reward alone.
"""

# P questions in a batch, G episodes of each (a group), T tokens of one sequence

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from lib import options
from lib.evaluation import Evaluation
from lib.progress import Progress, show
from lib.run import Run
from lib.start import path_of, started

from tinker_gmi.captures import Captures, datum_of

try:
    from agents import shop
    from openai import OpenAI, OpenAIError
except ModuleNotFoundError as package:
    options.end_without(package)

CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "%s"}}\n</tool_call>'
SEEN = 0.3  # of a reward: the tool was asked for the right item


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Train a tool-using agent by a reward.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 12, learning_rate=3e-4, save_every=4)
    arguments.add_argument(
        "--warm-up", type=int, default=7, help="steps that show how a call looks"
    )
    arguments.add_argument("--questions", type=int, default=4, help="per step")
    arguments.add_argument("--group-size", type=int, default=6, help="episodes of each question")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    items = sorted(shop.PRICES)
    held_out, train = items[::3][: args.held_out], [i for n, i in enumerate(items) if n % 3]
    with started(args, "agent") as start, Captures(args.base_url, args.api_key) as captures:
        training, metrics = start.training, start.metrics
        if metrics.is_new:
            warm_up(args, captures, training, train)
        weights = publish(training, "start")
        if metrics.is_new:
            metrics.begun(evaluate(args, captures, weights, held_out))
            start.save_to_go_on(0)
        show("before RL", metrics.before)

        progress = Progress("agent ", args.steps)
        for step, items_P in metrics.left(batches(args, train), args.steps):
            capture_id, rewards_P_G = rollout(args, captures, weights, items_P)
            trajectories = captures.datums(capture_id, loss="importance_sampling")["data"]
            data = [
                trajectory["datum"] for trajectory in trajectories if any(trajectory["advantages"])
            ]
            for datum in data:  # the loss is a mean over episodes
                gains = datum["loss_fn_inputs"]["advantages"]
                gains["data"] = [gain / rewards_P_G.size for gain in gains["data"]]
            if data:  # there is nothing to learn where all episodes of each group are alike
                data = [datum_of(tinker, datum) for datum in data]
                backward = training.forward_backward(data, "importance_sampling")
                update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                backward.result()
                update.result()
                weights = publish(training, f"step-{step}")
            captures.delete(capture_id)
            reward = float(rewards_P_G.mean())
            error = float(rewards_P_G.mean(axis=1).std() / len(items_P) ** 0.5)
            metrics.add(step, reward=reward, error=error)
            progress.step(step, reward=reward)
            start.save_to_go_on(step)

        saving = start.save()
        after = evaluate(args, captures, weights, held_out)
        show("after RL", after)
        path = path_of(saving)
        means, errors = metrics.values("reward"), metrics.values("error")
        return Run("agent", "mean reward", means, errors, metrics.before, after, path)


def batches(args: argparse.Namespace, items: list[str]) -> Iterator[list[str]]:
    """What the questions of each step are about, without end."""
    rng = np.random.default_rng(args.seed)
    while True:
        yield [str(item) for item in rng.choice(items, args.questions, replace=False)]


def publish(training: Any, name: str) -> str:
    return training.save_weights_for_sampler(name).result().path


def rollout(
    args: argparse.Namespace, captures: Captures, weights: str, items_P: list[str]
) -> tuple[str, np.ndarray]:
    """A capture session with G episodes of each question, and their rewards."""
    capture_id = captures.create(model=weights)["capture_id"]
    episodes = [(item, number) for item in items_P for number in range(args.group_size)]
    with ThreadPoolExecutor(len(episodes)) as pool:
        answers = list(pool.map(lambda e: episode(args, capture_id, *e), episodes))
    seen = {
        (trajectory["group"], trajectory["episode"]): [
            m["content"] for m in trajectory["messages"] if is_result(m)
        ]
        for trajectory in captures.trajectories(capture_id)
    }
    rewards: list[float] = []
    for (item, number), answer in zip(episodes, answers, strict=True):
        price = f"{shop.PRICES[item]} euros"
        called = price in seen.get((item, str(number)), ())
        rewards.append(1.0 if called and price in answer else SEEN if called else 0.0)
        captures.reward(capture_id, rewards[-1], group=item, episode=str(number))
    return capture_id, np.array(rewards).reshape(len(items_P), -1)


def episode(args: argparse.Namespace, capture_id: str, item: str, number: int) -> str:
    """The agent, unchanged: all that it is given is a base URL."""
    url = f"{args.base_url}/captures/{capture_id}/groups/{item}/episodes/{number}/oai/api/v1"
    try:
        with OpenAI(base_url=url, api_key=args.api_key, timeout=300) as client:
            return shop.answer(client, question(item))
    except OpenAIError as error:
        raise options.RecipeError(f"the agent's answer: {error}") from error


def question(item: str) -> str:
    return f"What does a {item} cost?"


def is_result(message: dict[str, Any]) -> bool:
    return message["role"] == "tool"


def warm_up(args: argparse.Namespace, captures: Captures, training: Any, items: list[str]) -> None:
    """The agent's first prompts, as they were captured, with a call after them."""
    tinker, tokenizer = args.sdk, training.get_tokenizer()
    capture_id = captures.create(model=args.model)["capture_id"]
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(lambda item: episode(args, capture_id, item, 0), items))
    captures.reward(capture_id, 0.0)
    data = []
    for trajectory in captures.datums(capture_id, advantages="raw")["data"]:
        tokens_T = trajectory["datum"]["model_input"]["chunks"][0]["tokens"]
        logprobs_T = trajectory["datum"]["loss_fn_inputs"]["logprobs"]["data"]
        num_prompt = next(i for i, logprob in enumerate(logprobs_T) if logprob) + 1
        call = CALL % trajectory["group"]
        call_T = [*tokenizer.encode(call, add_special_tokens=False), tokenizer.eos_token_id]
        tokens_T = tokens_T[:num_prompt] + call_T
        inputs = {
            "target_tokens": tokens_T[1:],
            "weights": [0.0] * (num_prompt - 1) + [1.0 / len(items)] * len(call_T),
        }
        model_input = tinker.ModelInput.from_ints(tokens_T[:-1])
        data.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    for _ in range(args.warm_up):
        backward = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-4)).result()
        print(f"warm-up loss {backward.result().metrics['loss:sum']:.3f}", flush=True)
    captures.delete(capture_id)


def evaluate(
    args: argparse.Namespace, captures: Captures, weights: str, items: list[str]
) -> Evaluation:
    """Questions that are never trained on, each asked as often as a group has episodes."""
    capture_id, rewards_P_G = rollout(args, captures, weights, items)
    last = {
        trajectory["group"]: trajectory["messages"][-1].get("content") or ""
        for trajectory in captures.trajectories(capture_id)
        if trajectory["episode"] == "0"
    }
    captures.delete(capture_id)
    right_P_G = rewards_P_G == 1.0
    examples = [
        (question(item), last.get(item, ""), bool(right_P_G[i, 0])) for i, item in enumerate(items)
    ]
    return Evaluation(float(right_P_G.mean()), right_P_G.size, examples)


if __name__ == "__main__":
    options.main(run, parser())
