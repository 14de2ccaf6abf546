"""How recipes that train begin, and what they save."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lib.evaluation import Evaluation, evaluate
from lib.metrics import Metrics
from lib.progress import show
from lib.tasks import Problem
from tinker_gmi.run_metrics import RunMetrics


@dataclass(frozen=True)
class Start:
    """A training client of a new adapter of --model, or of the weights of the recipe's `state`;
    where an earlier run goes on, with weights and moments of its last saved step."""

    args: argparse.Namespace
    service: Any
    training: Any
    tokenizer: Any
    metrics: Metrics

    def judge(self, when: str, sampler: Any, problems: list[Problem]) -> Evaluation:
        """The sampler's answers to the first --held-out problems, shown."""
        held_out = problems[: self.args.held_out]
        evaluation = evaluate(self.args.sdk, sampler, self.tokenizer, held_out)
        show(when, evaluation)
        return evaluation

    def judge_before(self, when: str, sampler: Any, problems: list[Problem]) -> Evaluation:
        """As `judge`; a run that goes on shows what the one before it was given."""
        if self.metrics.is_new:
            self.metrics.begun(self.judge(when, sampler, problems))
        else:
            show(when, self.metrics.before)
        return self.metrics.before

    def save_to_go_on(self, step: int) -> None:
        """After every --save-every steps."""
        if step % self.args.save_every == 0:
            saving = self.training.save_state(f"{self.metrics.name}-{step}")
            self.metrics.saved(step, saving.result().path)

    def save(self) -> Any:
        """A future of the trained weights, for `path_of`."""
        return self.training.save_state(self.metrics.name)


@contextmanager
def started(args: argparse.Namespace, name: str) -> Iterator[Start]:
    """name: of the recipe's metrics and of what it saves."""
    metrics = Metrics(args.out, name)
    server = {"base_url": args.base_url, "api_key": args.api_key}
    with args.sdk.ServiceClient(**server) as service, RunMetrics(**server) as console:
        training = _training_client(service, args, metrics)
        metrics.show(console, training.model_id)
        yield Start(args, service, training, training.get_tokenizer(), metrics)


def _training_client(service: Any, args: argparse.Namespace, metrics: Metrics) -> Any:
    if metrics.state is not None:
        return service.create_training_client_from_state_with_optimizer(metrics.state).result()
    if "state" in args:
        return service.create_training_client_from_state(args.state).result()
    return service.create_lora_training_client(args.model, rank=args.rank, seed=args.seed).result()


def path_of(saving: Any) -> str:
    """Of saved weights, shown: other recipes take it."""
    path = saving.result().path
    print(f"weights: {path}", flush=True)
    return path
