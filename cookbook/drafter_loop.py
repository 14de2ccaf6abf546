"""Speculation follows the policy: how many drafted tokens are accepted while the weights change.

The model learns to count in words, a list that it never wrote before. After every step its new
weights are sampled, and the server is asked what came of its drafts (`/health`). The default
drafter looks into what was sampled so far, that of older weights too; with `tinkercloud draft
train` and `tinkercloud serve --speculate head` a head drafts that learns from the training passes
themselves. Tokens and log-probabilities are the same bits with any drafts.
"""

# B sequences in a batch, T tokens of one sequence

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import httpx
from lib import chat, options
from lib.metrics import Metrics
from lib.progress import Progress
from lib.run import leave
from lib.start import started
from sft import make_data

WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen", "twenty"),
]
MAX_LENGTH = 14  # of a list
MAX_TOKENS = 48
COUNTED = ("verified", "accepted")
FRESH_S = 10.0  # until the server's numbers have what came, at most
NUM_JUDGED = 3  # steps at the beginning and at the end


@dataclass(frozen=True)
class Drafts:
    """Since the server's start: drafted tokens that the model judged, those it accepted, and all
    tokens that were sampled."""

    verified: int
    accepted: int
    sampled: int

    def since(self, before: "Drafts") -> "Drafts":
        return Drafts(
            self.verified - before.verified,
            self.accepted - before.accepted,
            self.sampled - before.sampled,
        )

    @property
    def share(self) -> float:
        """Of the judged tokens that were accepted; 0 where nothing was drafted."""
        return self.accepted / self.verified if self.verified else 0.0


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Watch speculation follow a model that is trained.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 12, learning_rate=5e-4, save_every=4)
    arguments.add_argument("--batch-size", type=int, default=8)
    arguments.add_argument("--questions", type=int, default=6, help="asked after each step")
    return arguments


def run(args: argparse.Namespace) -> None:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with (
        started(args, "drafter_loop") as start,
        httpx.Client(base_url=args.base_url, headers={"X-API-Key": args.api_key}) as http,
    ):
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        drafts_of(http)  # raises before it trains where this key is told nothing
        progress = Progress("drafts", args.steps)
        for step, pairs_B in metrics.left(batches(args.batch_size, args.seed), args.steps):
            examples_B_T = [chat.example(tokenizer, *pair) for pair in pairs_B]
            backward = training.forward_backward(make_data(tinker, examples_B_T), "cross_entropy")
            update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
            publication = training.save_weights_and_get_sampling_client()
            loss = backward.result().metrics["loss:sum"]
            update.result()
            before = drafts_of(http) or Drafts(0, 0, 0)  # told once it has sampled
            num_tokens = count(args, publication.result(), tokenizer, step)
            drafts = drafts_since(http, before, num_tokens)
            figures = {
                "loss": loss, "tokens": num_tokens,
                "drafted": drafts.verified, "accepted": drafts.share,
            }  # fmt: skip
            metrics.add(step, **figures)
            progress.step(step, **figures)
            start.save_to_go_on(step)
    report(args, metrics)


def batches(size: int, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Questions with their answers, without end."""
    rng = random.Random(seed)
    while True:
        yield [counting(rng) for _ in range(size)]


def counting(rng: random.Random) -> tuple[str, str]:
    first = rng.randrange(len(WORDS) - 4)
    last = min(first + rng.randint(4, MAX_LENGTH), len(WORDS)) - 1
    return f"Count from {first + 1} to {last + 1}.", ", ".join(WORDS[first : last + 1])


def count(args: argparse.Namespace, sampler: Any, tokenizer: Any, step: int) -> int:
    """How many tokens are said to the same questions after every step."""
    rng = random.Random(f"asked {args.seed}")
    futures = [
        sampler.sample(
            prompt=args.sdk.ModelInput.from_ints(chat.prompt_tokens(tokenizer, counting(rng)[0])),
            num_samples=1,
            sampling_params=args.sdk.SamplingParams(
                max_tokens=MAX_TOKENS, seed=step * args.questions + i
            ),
        )
        for i in range(args.questions)
    ]
    return sum(len(future.result().sequences[0].tokens) for future in futures)


def drafts_since(http: httpx.Client, before: Drafts, num_tokens: int) -> Drafts:
    """With so many tokens, which have come: the server's numbers may be a second old. Raises
    RecipeError where it tells nothing."""
    deadline = time.monotonic() + FRESH_S
    while True:
        now = drafts_of(http)
        if now is not None and now.since(before).sampled >= num_tokens:
            return now.since(before)
        if time.monotonic() > deadline:
            raise options.RecipeError("this server drafts nothing")
        time.sleep(0.05)


def drafts_of(http: httpx.Client) -> Drafts | None:
    """None: the server tells nothing of drafts. Raises RecipeError."""
    try:
        health = http.get("/health").raise_for_status().json()
    except httpx.HTTPError as error:
        raise options.RecipeError(f"the server's /health: {error}") from error
    if "backend" not in health:
        raise options.RecipeError(
            "where there are several users, the server's numbers are for administrators and for "
            "those that --metrics-users names: give the key of one"
        )
    speculation = health.get("speculation")
    if not speculation:
        return None
    depths = [
        depth
        for model in speculation.values()
        for drafter in model["drafters"].values()
        for depth in drafter["depths"]
    ]
    verified, accepted = (sum(depth[name] for depth in depths) for name in COUNTED)
    return Drafts(verified, accepted, health["backend"]["tokens_sampled"])


def report(args: argparse.Namespace, metrics: Metrics) -> None:
    shares, losses = metrics.values("accepted"), metrics.values("loss")
    first, last = (fmean(part) for part in (shares[:NUM_JUDGED], shares[-NUM_JUDGED:]))
    print(f"drafted tokens accepted: {first:.0%} -> {last:.0%}", flush=True)
    figures = {"accepted": shares, "losses": losses}
    leave(
        args.out, "drafter_loop", figures, lambda plot, path: plot.draw_drafts(path, shares, losses)
    )


if __name__ == "__main__":
    options.main(run, parser())
