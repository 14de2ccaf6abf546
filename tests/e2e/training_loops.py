"""SFT and RL as a user's script has them, and every number that such a script sees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.e2e.clients import Client, logprobs_of

LoopName = Literal["sft", "rl"]
RANK = 4
SAVE_EVERY = 3  # steps
GROUP_SIZE = 4
PROMPTS = ([504, 4052, 338, 1783], [1848, 260, 2732, 1194, 282, 260, 8142])
Ids = list[int]


@dataclass
class Seen:
    """numbers: by where they came from. saved: paths of the checkpoints by the step after which
    they were saved."""

    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    saved: dict[str, str] = field(default_factory=dict[str, str])

    def differences(self, other: "Seen") -> list[str]:
        """Places where the two do not have the same bits."""
        places = self.numbers.keys() | other.numbers.keys()
        return sorted(p for p in places if self.numbers.get(p) != other.numbers.get(p))


@dataclass(frozen=True)
class TrainingLoop:
    """begins: is called with the number of each step before it."""

    name: LoopName
    num_steps: int

    def run(self, client: Client, seen: Seen, begins: Callable[[int], None]) -> None:
        model = client.model(rank=RANK)
        for step in range(self.num_steps):
            begins(step)
            STEPS[self.name](client, model, step, seen.numbers)
            if step % SAVE_EVERY == SAVE_EVERY - 1 or step == self.num_steps - 1:
                seen.saved[f"step {step}"] = model.save_state(f"step-{step}").result().path
        begins(self.num_steps)


def sft_step(client: Client, model: Any, step: int, numbers: dict[str, Any]) -> None:
    """Two passes whose gradients are added, a step, and a look at what the model says now."""
    passes = [
        model.forward_backward([client.supervised(text(2 * step + half))], "cross_entropy")
        for half in range(2)
    ]
    stepping = model.optim_step(client.adam())
    for half, output in enumerate(each.result() for each in passes):
        numbers[f"step {step}, pass {half}"] = pass_numbers(output, 1)
    numbers[f"step {step}, gradient norm"] = gradient_norm(stepping)
    samples(client, model, step, PROMPTS[:1], numbers)


def rl_step(client: Client, model: Any, step: int, numbers: dict[str, Any]) -> None:
    """Groups of samples of the current weights, advantages within the group, one pass, a step."""
    groups = samples(client, model, step, PROMPTS, numbers)
    data = [
        datum for prompt, group in zip(PROMPTS, groups, strict=True)
        for datum in policy_datums(client, prompt, group)
    ]  # fmt: skip
    training = model.forward_backward(data, "importance_sampling")
    stepping = model.optim_step(client.adam())
    numbers[f"step {step}, pass"] = pass_numbers(training.result(), len(data))
    numbers[f"step {step}, gradient norm"] = gradient_norm(stepping)


STEPS: Mapping[LoopName, Callable[[Client, Any, int, dict[str, Any]], None]] = {
    "sft": sft_step,
    "rl": rl_step,
}


def text(number: int, num_tokens: int = 64) -> Ids:
    return [(7 * i * i + 13 * number) % 40_000 for i in range(num_tokens)]


def samples(
    client: Client, model: Any, step: int, prompts: "tuple[Ids, ...]", numbers: dict[str, Any]
) -> list[list[Any]]:
    """A group of each prompt, by the weights as they are now."""
    sampler = model.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    params = client.params(max_tokens=16, temperature=1.0, seed=step, stop=[])
    futures = [sampler.sample(client.prompt(prompt), GROUP_SIZE, params) for prompt in prompts]
    groups = [future.result().sequences for future in futures]
    for i, group in enumerate(groups):
        numbers[f"step {step}, samples of prompt {i}"] = [
            (list(sample.tokens), list(sample.logprobs)) for sample in group
        ]
    return groups


def policy_datums(client: Client, prompt: Ids, group: list[Any]) -> list[Any]:
    """What is rewarded is frequent tokens."""
    rewards = [sum(token < 1000 for token in sample.tokens) / 16 for sample in group]
    mean = sum(rewards) / len(rewards)
    held = len(prompt) - 1
    data = []
    for sample, reward in zip(group, rewards, strict=True):
        tokens = [*prompt, *sample.tokens]
        data.append(
            client.datum(
                tokens[:-1],
                target_tokens=tokens[1:],
                logprobs=[0.0] * held + list(sample.logprobs),
                advantages=[0.0] * held + [reward - mean] * len(sample.tokens),
            )
        )
    return data


def pass_numbers(output: Any, num_datums: int) -> tuple[list[list[float]], float]:
    """(log-probabilities of each datum, the loss)."""
    logprobs = [logprobs_of(output, i).tolist() for i in range(num_datums)]
    return logprobs, output.metrics["loss:sum"]


def gradient_norm(stepping: Any) -> float:
    return stepping.result().metrics["unclipped_grad_l2:mean"]
