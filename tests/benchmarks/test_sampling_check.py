"""What the sampling benchmark does with a contender whose tokens are not those of float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.sampling_bench import Bench, Case, Measured, Prompts, greedy_table
from benchmarks.peers.sampling_check import NOT_ROUNDING_NATS, GreedyCheck, Reference
from benchmarks.peers.sampling_common import Load, Outcome, outcome

VOCABULARY = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes)
    tiny = LlamaForCausalLM(config)
    tiny.lm_head.weight.data *= 10.0  # likely and unlikely tokens
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_pretrained(folder)
    return tiny.eval(), folder


class Decoder:
    """Draws from the model, or takes the likeliest token. rank: of the token that it takes as its
    third greedy one, 0 the likeliest. num_drawn: sequences that were not greedy."""

    name, version, pid = "decoder", "1", None

    def __init__(self, model: Any, rank: int):
        self._model, self._rank = model, rank
        self.num_drawn = 0

    async def prepare(self, load: Load) -> None:
        """Nothing is to be made ready."""

    @torch.inference_mode()
    async def generate(self, load: Load) -> Outcome:
        samples = [self._sample(prompt, load) for prompt in load.prompts]
        self.num_drawn += 0 if load.greedy else len(samples)
        return outcome(load, 0.0, samples)

    async def latency(self, load: Load) -> None:
        return None

    async def close(self) -> None:
        """Nothing is open."""

    def _sample(self, prompt: tuple[int, ...], load: Load) -> list[int]:
        tokens: list[int] = []
        for place in range(load.max_tokens):
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            if load.greedy:
                rank = self._rank if place == 2 else 0
                tokens.append(int(logits.argsort(descending=True)[rank]))
            else:
                tokens.append(int(torch.multinomial(logits.softmax(-1), 1)))
        return tokens


async def compete(model: Any, rank: int) -> Bench:
    tiny, folder = model
    prompts = Prompts(np.random.default_rng(0).integers(0, VOCABULARY, 500).tolist())
    case = Case(8, 2, max_tokens=4)
    bench = Bench([case], prompts, latencies=False, budget_s=60.0, between=lambda: None)
    await bench.compete([Decoder(tiny, rank)], Reference(Path(folder)), "float32")
    return bench


async def test_greedy_tokens_that_are_the_likeliest_differ_nowhere(model: Any):
    bench = await compete(model, rank=0)
    ((_, _, check),) = bench.greedy
    assert (check.tokens, check.differing, check.first) == (9 * 24, 0, None)
    assert check.gap_nats == 0.0
    assert [row.tokens for row in bench.rows] == [2 * 4]


async def test_a_contender_whose_greedy_tokens_differ_is_timed_and_its_gap_is_reported(model: Any):
    bench = await compete(model, rank=1)
    ((_, _, check),) = bench.greedy
    assert (check.differing, check.first) == (9, 3)  # one in each of nine sequences
    assert 0 < check.gap_nats < NOT_ROUNDING_NATS
    assert len(bench.rows) == 1
    (row,) = greedy_table(bench.greedy).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["decoder", "float32", "216", "9", "3", f"{check.gap_nats:.3f}"]


async def test_a_contender_that_computes_something_else_is_not_timed(model: Any):
    bench = await compete(model, rank=VOCABULARY - 1)
    assert bench.rows == []
    assert "decoder is wrong, and not timed: a greedy token is" in bench.notes[0]


async def test_a_contender_runs_as_often_as_its_time_allows(model: Any):
    tiny, folder = model
    prompts = Prompts(np.random.default_rng(0).integers(0, VOCABULARY, 500).tolist())
    case = Case(8, 2, max_tokens=4)
    row = Measured("decoder", "float32", case, 10.0, 8, 0)  # so is this load again: ten seconds
    for left_s, runs, note in (
        (25.0, 2, "2 at once was run 2 of 3 times"),
        (9.0, 0, "was not run"),
    ):
        bench = Bench([case], prompts, latencies=False, budget_s=100.0, between=lambda: None)
        bench.rows, bench.spent_s = [row], {"decoder, float32": 100.0 - left_s}
        decoder = Decoder(tiny, 0)
        await bench.compete([decoder], Reference(Path(folder)), "float32")
        assert len(bench.rows) == 1 + (runs > 0)
        assert decoder.num_drawn == runs * case.at_once
        assert note in bench.notes[0]


def test_the_gap_is_that_of_the_token_after_those_that_were_chosen_before(model: Any):
    tiny, folder = model
    prompt, tokens = [1, 2, 3], [4, 5]
    gaps = Reference(Path(folder)).greedy_gaps(prompt, tokens)
    with torch.inference_mode():
        for place, token in enumerate(tokens):
            logits = tiny(torch.tensor([prompt + tokens[:place]])).logits[0, -1].double()
            log_p = logits.log_softmax(-1)
            assert gaps[place] == pytest.approx(float(log_p.max() - log_p[token]), abs=1e-5)


def test_the_places_of_tokens_that_differ_are_counted_from_one():
    check = GreedyCheck.of([np.array([0.0, 0.0, 0.5]), np.array([0.0, 0.1])])
    assert check == GreedyCheck(tokens=5, differing=2, first=2, gap_nats=0.5)
