"""T4 for drafters that share the target's noise: tokens are accepted as their distributions say."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.embedded.speculative_engine import (
    LAWS,
    Drafting,
    Oracle,
    Watched,
    all_same,
    mixture,
    untaught_head,
)
from tests.embedded.tiny import VOCAB, Sampler, ask, open_store, random_prompt, tuned
from tinkercloud.core.types import FromBase
from tinkercloud.embedded.drafting import model_drafter
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.network_drafter import row_params
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.embedded.sampling.trace import Trace
from tinkercloud.speculative.draft_length.fixed_length import FixedLength
from tinkercloud.speculative.draft_length.rounds import Load, Reason
from tinkercloud.speculative.drafters.draft_distribution import AUDIT_EVERY
from tinkercloud.speculative.drafters.drafter import Draft, Stream
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


def reporting_model(
    folder: Path, audit_every: int = 1, kind: type[ModelDrafter] = ModelDrafter
) -> Callable[[int], ModelDrafter]:
    """A model whose drafts report their distributions."""

    def make(_: int) -> ModelDrafter:
        base = BaseModel.load("draft", folder, folder, torch.float32, torch.device("cpu"))
        pool = BlockPool(base.config, base.dtype, base.device, 800)
        version = Version("draft", base, base.weights, None, 1.0)
        return kind(version, NativeRunner(1), pool, audit_every)

    return make


class DistributionsOfTheTokenBefore(ModelDrafter):
    """Reports for each token the distribution of the token before."""

    def propose(self, requests: Sequence[tuple[Stream, int]]) -> list[Draft]:
        return [
            replace(draft, distributions=(*draft.distributions[:1], *draft.distributions[:-1]))
            for draft in super().propose(requests)
        ]


def with_distributions_of_the_token_before(folder: Path) -> Callable[[int], ModelDrafter]:
    return reporting_model(folder, 1, DistributionsOfTheTokenBefore)


def calibration(speculation: Speculation | None) -> tuple[float, int]:
    """z, and how many tokens it is of."""
    assert speculation is not None
    snapshot = speculation.snapshot()
    assert snapshot["refused"] == {}
    (record,) = snapshot["drafters"].values()
    return record["calibration_z"], record["calibration_tokens"]


@pytest.mark.parametrize(("temperature", "more"), LAWS, ids=str)
def test_a_model_with_the_targets_noise_is_accepted_as_often_as_its_distributions_say(
    folder: Path, temperature: float, more: dict[str, object]
) -> None:
    """Of a tuned target by its base. At temperature 0 nothing is drawn, nothing audited."""
    store = open_store(folder)
    target = tuned(store, "m", 4)
    drafting = Drafting(reporting_model(folder), 3)
    sampler = Sampler(store, speculate=drafting)
    for seed in range(3):
        requests = mixture(target, 4, temperature, **more)
        sampler.run({
            name: (version, replace(one, params=replace(one.params, seed=50 * seed + int(name))))
            for name, (version, one) in requests.items()
        })  # fmt: skip
    z, num_tokens = calibration(drafting.speculation)
    assert drafting.policy.stops == [] and abs(z) < 4
    assert num_tokens > 400 if temperature else num_tokens == 0


def test_a_head_is_accepted_as_often_as_its_distributions_say(folder: Path) -> None:
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    drafter = HeadDrafter(TorchHead(*untaught_head(store.base("tiny"))), audit_every=1)
    sampler = Sampler(store, speculate=Drafting(lambda _: drafter, 3))
    sampler.run(mixture(base, 12, 1.0, use_eos=False))
    snapshot = sampler.engine.speculation()[0]["tiny"]
    record = snapshot["drafters"]["head"]
    assert snapshot["refused"] == {} and not record["alarmed"]
    assert record["calibration_tokens"] > 400 and abs(record["calibration_z"]) < 4
    assert record["depths"][0]["expected"] > 1.5 * record["depths"][0]["audited"] / VOCAB


def test_about_one_draft_in_a_hundred_reports_its_distributions(folder: Path) -> None:
    store = open_store(folder)
    drafting = Drafting(reporting_model(folder, AUDIT_EVERY), 1)
    sampler = Sampler(store, speculate=drafting)
    sampler.run(mixture(tuned(store, "m", 4), 10, 1.0, use_eos=False))
    _, num_tokens = calibration(drafting.speculation)
    num_drafts = sum(entry.num_verified for entry in drafting.policy.rounds)
    assert num_tokens == num_drafts // AUDIT_EVERY > 1


def test_samples_that_end_within_their_drafts_raise_no_alarm(folder: Path) -> None:
    """The target as its own draft: each token is accepted, those that stop a sample too."""
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    drafting = Drafting(reporting_model(folder), 3)
    requests = mixture(base, 30, 1.0, stop_token_ids=tuple(range(0, 256, 16)))
    outputs = Sampler(store, speculate=drafting).run(requests)
    all_same(outputs, Sampler(store).run(requests))
    reasons = [one.stop_reason for output in outputs.values() for one in output.sequences]
    assert reasons.count("stop") > 20
    rounds = drafting.policy.rounds
    assert sum(sum(entry.num_judged) for entry in rounds) == drafting.policy.num_accepted > 200
    assert sum(entry.num_emitted for entry in rounds) == sum(
        len(one.tokens) - 1 for output in outputs.values() for one in output.sequences
    )  # the first of each comes with its prompt
    assert drafting.policy.stops == [] and calibration(drafting.speculation)[1] > 200


def test_the_trace_of_a_draft_that_ends_its_sample_has_its_accepted_tokens(
    folder: Path, tmp_path: Path
) -> None:
    store = open_store(folder)
    base = store.publish(FromBase("tiny"))
    prompt, path = random_prompt(20, 1), tmp_path / "rounds.jsonl"
    free = ask(prompt, max_tokens=30, seed=1, use_eos=False)
    whole = Sampler(store).one(base, free)
    tokens = [*prompt, *whole.sequences[0].tokens.tolist()]
    stop = next(i for i in range(24, 40) if tokens[i] not in tokens[20:i])

    def traced(*args: object) -> Speculation:
        return Speculation(GuardedDrafter(Oracle([tokens]), VOCAB), FixedLength(30), Trace(path))

    Sampler(store, speculate=traced).one(
        base, replace(free, params=replace(free.params, stop_token_ids=(tokens[stop],)))
    )
    (line,) = (json.loads(line) for line in path.read_text().splitlines())
    assert line["position"] == 21 and line["accepted"] == stop - 20
    assert line["target"] == tokens[21 : stop + 1] == line["drafted"][: stop - 20]


class Choosy(Watched):
    """Verifies what the drafter is sure of, which depends on the tokens drafted."""

    def choose(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [sum(np.cumprod([share > 0.2 for share in own])) for own in confidences]


@pytest.mark.slow
def test_a_model_that_is_right_runs_long_without_alarm(folder: Path) -> None:
    """With all of its drafts audited, and those verified of which it is sure."""
    store = open_store(folder)
    target = tuned(store, "m", 4)
    drafting = Drafting(reporting_model(folder), 4)
    drafting.policy = Choosy(4)
    sampler = Sampler(store, speculate=drafting)
    for seed in range(5):
        request = ask(random_prompt(8, seed), n=16, max_tokens=120, seed=900 + seed, use_eos=False)
        sampler.run({"0": (target, request)})
    z, num_tokens = calibration(drafting.speculation)
    assert drafting.policy.stops == [] and abs(z) < 4 and num_tokens > 2000


class Stoppable(Watched):
    """Drafts no more once it is stopped."""

    def limits(self, loads: Sequence[Load]) -> list[int]:
        return super().limits(loads) if self.is_on else [0] * len(loads)

    def stop(self, reason: Reason) -> None:
        super().stop(reason)
        self.is_on = False


def drawing_with_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on models draft with the noise of the place after."""
    monkeypatch.setattr(
        model_drafter, "row_params", lambda stream, ahead: row_params(stream, ahead + 1)
    )


@pytest.mark.parametrize("wrong", ["noise", "distributions"])
def test_noise_or_distributions_of_another_place_raise_the_alarm_and_turn_drafts_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    store = open_store(folder)
    requests = mixture(tuned(store, "m", 4), 16, 1.0, use_eos=False)
    plain = Sampler(store).run(requests)
    make = reporting_model(folder)
    if wrong == "noise":
        drawing_with_other_noise(monkeypatch)
    else:
        make = with_distributions_of_the_token_before(folder)
    drafting = Drafting(make, 2)
    drafting.policy = Stoppable(2)
    all_same(Sampler(store, speculate=drafting).run(requests), plain)
    assert drafting.speculation is not None
    snapshot = drafting.speculation.snapshot()
    assert snapshot["drafters"]["model"]["alarmed"] and snapshot["refused"] == {}
    assert drafting.policy.stops == [Reason.ALARM] and not snapshot["on"]
    last = next(i for i, one in enumerate(drafting.policy.rounds) if not one.num_verified)
    assert not any(one.num_verified for one in drafting.policy.rounds[last:])
