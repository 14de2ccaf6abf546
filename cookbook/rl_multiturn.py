"""Reinforcement learning over several turns: guess a number from 1 to 3 in two guesses.

After a guess the game says "Higher." or "Lower.", so that who begins in the middle and listens wins
every game; who guesses at random wins 56%. A few steps of supervised fine-tuning on guesses at
random show the form, and the rest is learned by the reward of the whole game alone. A game is one
sequence: every turn goes on in the tokens before it, and all of its guesses get its advantage. A
harder game is `--largest 7 --turns 3`; it takes many more steps.
"""

# P numbers in a batch, G games with each (a group), T tokens of one sequence

import argparse
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lib import chat, options
from lib.evaluation import SEED, Evaluation
from lib.progress import Progress, show
from lib.run import Run
from lib.start import path_of, started

MAX_TOKENS = 4


@dataclass
class Game:
    """One conversation. turns: guesses at most. tokens_T: all of it. logprobs_T: of its guesses'
    tokens, 0 elsewhere; is_guess_T tells which those are."""

    number: int
    turns: int
    tokens_T: list[int]
    logprobs_T: list[float] = field(default_factory=list)
    is_guess_T: list[bool] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pad()

    @property
    def is_won(self) -> bool:
        return self.guesses[-1:] == [str(self.number)]

    def guess(self, tokenizer: Any, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens_T += tokens
        self.logprobs_T += logprobs
        self.is_guess_T += [True] * len(tokens)
        self.guesses.append(chat.answer_text(tokenizer, tokens).strip())

    def hint(self, tokenizer: Any) -> bool:
        """Whether the game goes on, and then with a hint behind the last guess."""
        if self.is_won or len(self.guesses) == self.turns or not self.guesses[-1].isdecimal():
            return False
        word = "Higher." if int(self.guesses[-1]) < self.number else "Lower."
        self.tokens_T += chat.reply_tokens(tokenizer, word)
        self._pad()
        return True

    def _pad(self) -> None:
        num_more = len(self.tokens_T) - len(self.is_guess_T)
        self.logprobs_T += [0.0] * num_more
        self.is_guess_T += [False] * num_more


def parser() -> argparse.ArgumentParser:
    arguments = options.parser("Improve a model by a reward for whole conversations.")
    options.add_adapter(arguments)
    options.add_steps(arguments, 15, learning_rate=3e-4, save_every=5)
    arguments.add_argument("--warm-up", type=int, default=6, help="steps of guesses at random")
    arguments.add_argument("--largest", type=int, default=3, help="number to guess")
    arguments.add_argument("--turns", type=int, default=2, help="guesses in a game, at most")
    arguments.add_argument("--group-size", type=int, default=16, help="games with each number")
    return arguments


def run(args: argparse.Namespace) -> Run:
    tinker = args.sdk  # the same as `import tinker_gmi as tinker`, or `import tinker`
    with started(args, "rl_multiturn") as start:
        training, tokenizer, metrics = start.training, start.tokenizer, start.metrics
        if metrics.is_new:
            warm_up(args, tokenizer, training)
        sampler = training.save_weights_and_get_sampling_client().result()
        if metrics.is_new:
            metrics.begun(judge(args, tokenizer, sampler))
            start.save_to_go_on(0)
        show("before RL", metrics.before)

        progress = Progress("RL ", args.steps)
        for step, _ in metrics.left(itertools.repeat(None), args.steps):
            games_P_G = new_games(args, tokenizer, args.group_size)
            play(args, tokenizer, sampler, games_P_G, (args.seed * 2**20 + step) * 2**10)
            rewards_P_G = np.array([[float(g.is_won) for g in games] for games in games_P_G])
            advantages_P_G = rewards_P_G - rewards_P_G.mean(axis=1, keepdims=True)
            data = make_data(tinker, games_P_G, advantages_P_G)
            if data:  # there is nothing to learn where all games of each group end alike
                # All three are sent before the first is waited for.
                backward = training.forward_backward(data, "importance_sampling")
                update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                publication = training.save_weights_and_get_sampling_client()
                backward.result()
                update.result()
                sampler = publication.result()
            reward = float(rewards_P_G.mean())
            error = float(rewards_P_G.mean(axis=1).std() / args.largest**0.5)
            metrics.add(step, reward=reward, error=error)
            progress.step(step, reward=reward)
            start.save_to_go_on(step)

        saving = start.save()
        after = judge(args, tokenizer, sampler)
        show("after RL", after)
        path = path_of(saving)
        means, errors = metrics.values("reward"), metrics.values("error")
        return Run("rl_multiturn", "games won", means, errors, metrics.before, after, path)


def new_games(args: argparse.Namespace, tokenizer: Any, group_size: int) -> list[list[Game]]:
    start_T = question_tokens(args, tokenizer)
    return [
        [Game(number, args.turns, list(start_T)) for _ in range(group_size)]
        for number in range(1, args.largest + 1)
    ]


def question_tokens(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    return chat.prompt_tokens(tokenizer, f"Guess my number, from 1 to {args.largest}.")


def play(
    args: argparse.Namespace, tokenizer: Any, sampler: Any, games_P_G: list[list[Game]], seed: int
) -> None:
    """All games side by side, to their ends. seed: of the first game's first guess."""
    games = [game for group in games_P_G for game in group]
    playing = list(range(len(games)))
    while playing:
        futures = [
            sampler.sample(
                prompt=args.sdk.ModelInput.from_ints(games[i].tokens_T),
                num_samples=1,
                sampling_params=args.sdk.SamplingParams(
                    max_tokens=MAX_TOKENS, seed=seed + i * args.turns + len(games[i].guesses)
                ),
            )
            for i in playing
        ]
        for i, future in zip(playing, futures, strict=True):
            (sequence,) = future.result().sequences
            games[i].guess(tokenizer, list(sequence.tokens), list(sequence.logprobs))
        playing = [i for i in playing if games[i].hint(tokenizer)]


def make_data(tinker: Any, games_P_G: list[list[Game]], advantages_P_G: np.ndarray) -> list[Any]:
    """Advantages are divided by P * G, so that the loss is a mean over games. Position i predicts
    token i + 1."""
    data = []
    for games, advantages_G in zip(games_P_G, advantages_P_G / advantages_P_G.size, strict=True):
        for game, advantage in zip(games, advantages_G, strict=True):
            if advantage != 0:
                inputs = {
                    "target_tokens": game.tokens_T[1:],
                    "logprobs": game.logprobs_T[1:],
                    "advantages": [float(advantage) * is_guess for is_guess in game.is_guess_T[1:]],
                }
                model_input = tinker.ModelInput.from_ints(game.tokens_T[:-1])
                data.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return data


def warm_up(args: argparse.Namespace, tokenizer: Any, training: Any) -> None:
    """Games whose guesses know nothing of the hints."""
    tinker, rng = args.sdk, random.Random(args.seed)
    for _ in range(args.warm_up):
        games = [random_game(args, tokenizer, rng) for _ in range(16)]
        num_tokens = sum(sum(game.is_guess_T) for game in games)
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(game.tokens_T[:-1]),
                loss_fn_inputs={
                    "target_tokens": game.tokens_T[1:],
                    "weights": [is_guess / num_tokens for is_guess in game.is_guess_T[1:]],
                },
            )
            for game in games
        ]
        backward = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate)).result()
        print(f"warm-up loss {backward.result().metrics['loss:sum']:.3f}", flush=True)


def random_game(args: argparse.Namespace, tokenizer: Any, rng: random.Random) -> Game:
    game = Game(rng.randint(1, args.largest), args.turns, question_tokens(args, tokenizer))
    while True:
        tokens = chat.answer_tokens(tokenizer, str(rng.randint(1, args.largest)))
        game.guess(tokenizer, tokens, [0.0] * len(tokens))
        if not game.hint(tokenizer):
            return game


def judge(args: argparse.Namespace, tokenizer: Any, sampler: Any) -> Evaluation:
    """--held-out games with every number, with seeds of their own."""
    games_P_G = new_games(args, tokenizer, args.held_out)
    play(args, tokenizer, sampler, games_P_G, SEED)
    wins = [game.is_won for games in games_P_G for game in games]
    examples = [
        (f"the number {games[0].number}", ", ".join(games[0].guesses), games[0].is_won)
        for games in games_P_G
    ]
    return Evaluation(sum(wins) / len(wins), len(wins), examples, "games won")


if __name__ == "__main__":
    options.main(run, parser())
