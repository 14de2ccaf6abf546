"""Samples that ask for details: a line for each with where its drafts were wrong, and the same
tokens as samples that do not ask."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.embedded.speculative_engine import Watched, all_same, knowing, mixture
from tests.embedded.tiny import Sampler
from tinkercloud.core.types import SampleOutput
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import Runner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.sampling.detailed_log import DetailedLog
from tinkercloud.embedded.sampling.speculation import Speculation
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.guarded_drafter import GuardedDrafter

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")


def test_details_say_where_a_draft_was_wrong_and_change_no_token(
    store: ModelStore, base: str, tmp_path: Path
) -> None:
    requests = mixture(base, 3, 1.0)
    plain = Sampler(store).run(requests)
    drafter = knowing(plain, requests, err_every=4)
    detailed = {
        name: (version, replace(request, details_for="s1" if name == "1" else ""))
        for name, (version, request) in requests.items()
    }
    path = tmp_path / "details.jsonl"
    outputs = run(store, drafter, DetailedLog(path), detailed)
    all_same(outputs, plain)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["session"], line["sample"]) for line in lines] == [("s1", 0), ("s1", 1)]
    prompt = requests["1"][1].prompt.tolist()
    for line, sequence in zip(lines, plain["1"].sequences, strict=True):
        tokens = [*prompt, *sequence.tokens.tolist()]
        assert line["prompt_tokens"] == len(prompt)
        wrong = line["disagreements"]
        assert len(wrong) == line["judged"] - line["accepted"] > 3
        assert line["acceptance"] == pytest.approx(line["accepted"] / line["judged"], abs=1e-4)
        for each in wrong:
            assert each["position"] % 4 == 0
            assert each["target"] == tokens[each["position"]] != each["drafted"]
            assert each["draft_confidence"] == 0.5
            top = dict(each["top"])
            assert len(top) == 8
            assert list(top.values()) == sorted(top.values(), reverse=True)
            if each["target"] in top:
                assert each["target_confidence"] == top[each["target"]]


def test_the_file_begins_anew_where_it_is_full(
    store: ModelStore, base: str, tmp_path: Path
) -> None:
    requests = {
        name: (version, replace(request, details_for="s"))
        for name, (version, request) in mixture(base, 1, 1.0).items()
    }
    plain = Sampler(store).run(requests)
    path = tmp_path / "details.jsonl"
    for _ in range(3):
        run(store, knowing(plain, requests, err_every=4), DetailedLog(path, 10), requests)
    assert len(path.read_text().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == [tmp_path / "details.before.jsonl", path]


def run(
    store: ModelStore, drafter: Drafter, details: DetailedLog, requests: dict
) -> dict[str, SampleOutput]:
    def speculate(base: BaseModel, runner: Runner, pool: BlockPool) -> Speculation:
        guard = GuardedDrafter(drafter, base.config.vocab_size)
        return Speculation(guard, Watched(4), details=details)

    return Sampler(store, speculate=speculate).run(requests)
