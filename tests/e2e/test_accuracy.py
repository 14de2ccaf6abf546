"""SmolLM2 against transformers in float32 on the file's own weights: what is sampled and what is
scored, in bfloat16 and in float32, and the gradients."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import tinker

from benchmarks.lib.accuracy import (
    MOST_NATS,
    MOST_NATS_FLOAT32,
    MOST_OF_FLOOR,
    Distance,
    Text,
    Yardstick,
)
from benchmarks.lib.gradients import distances
from benchmarks.lib.smollm2 import tokenizer_of
from tests.e2e.clients import MODEL, Client
from tests.serving import start_server

PROMPT, LENGTH = 16, 256
CHAPTERS = (
    *("assignment", "class", "compound", "debugger", "execmodel"),
    *("formatstrings", "function", "import", "specialnames", "typesseq"),
)
"""Of the Python reference, which Python brings: natural text that changes with no edit here. Ten,
because the distance of a single one is 1.1 to 1.5 times its floor."""

KINDS = ("sampled", "natural")
Measure = Callable[[str], dict[str, Distance]]


@pytest.fixture(scope="module")
def measure(
    smollm2_gguf: Path, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Measure:
    """Of a number type: the distances of what a server of it samples, and of what it scores."""
    yardstick = Yardstick(smollm2_folder)

    def measured(dtype: str) -> dict[str, Distance]:
        served = ("--model", f"{MODEL}={smollm2_gguf}", "--dtype", dtype)
        with start_server(*served, data_dir=tmp_path_factory.mktemp("data")) as server:
            client = Client.connect(tinker, server)
            texts = {
                "sampled": sampled(client, smollm2_folder),
                "natural": scored(client, smollm2_folder),
            }
            client.close()
        return {kind: yardstick.distance(of_kind) for kind, of_kind in texts.items()}

    return measured


def sampled(client: Client, smollm2_folder: Path) -> list[Text]:
    """What goes on from each chapter's beginning."""
    sampler, tokenizer = client.base_sampler(), tokenizer_of(smollm2_folder)
    texts: list[Text] = []
    for seed, chapter in enumerate(CHAPTERS):
        prompt = tokenizer.encode(topics[chapter]).ids[:PROMPT]
        rest = {"max_tokens": LENGTH - PROMPT, "seed": seed, "stop": []}
        (drawn,) = client.sample(sampler, prompt, temperature=1.0, **rest)
        texts.append(Text(prompt, drawn.tokens, drawn.logprobs))
    return texts


def scored(client: Client, smollm2_folder: Path) -> list[Text]:
    """By `compute_logprobs`."""
    sampler, tokenizer = client.base_sampler(), tokenizer_of(smollm2_folder)
    texts: list[Text] = []
    for chapter in CHAPTERS:
        ids = tokenizer.encode(topics[chapter]).ids[:LENGTH]
        logprobs = sampler.compute_logprobs(client.prompt(ids)).result()[PROMPT:]
        texts.append(Text(ids[:PROMPT], ids[PROMPT:], np.array(logprobs, np.float32)))
    return texts


@pytest.fixture(scope="module")
def bfloat16(measure: Measure) -> dict[str, Distance]:
    return measure("bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_in_bfloat16_are_near_float32(bfloat16: dict[str, Distance], kind: str) -> None:
    assert bfloat16[kind].nats < MOST_NATS, bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_in_bfloat16_stay_near_the_floor(bfloat16: dict[str, Distance], kind: str) -> None:
    assert bfloat16[kind].of_floor < MOST_OF_FLOOR, bfloat16


@pytest.mark.slow
def test_logprobs_in_float32_are_those_of_float32(measure: Measure) -> None:
    float32 = measure("float32")
    assert max(distance.nats for distance in float32.values()) < MOST_NATS_FLOAT32, float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_gradients_are_no_further_from_float32_than_those_of_autocast(smollm2_folder: Path) -> None:
    with tempfile.TemporaryDirectory() as root:
        for kind, apart in distances(Path(root), smollm2_folder).items():
            assert apart.ours <= apart.autocast, (kind, apart)
