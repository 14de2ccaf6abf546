"""Drafts on real weights: the same tokens and log-probabilities, whoever drafts and how much."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.embedded.speculative_engine import Drafting, untaught_head
from tests.serving import Server, start_server
from tests.speculative.drafters.trial_drafters import trial_table
from tests.waiting import wait_for
from tinkercloud.core.types import SampleOutput, SampleRequest, SamplingParams
from tinkercloud.embedded.drafting.head_drafter import HeadDrafter
from tinkercloud.embedded.drafting.head_network import TorchHead
from tinkercloud.embedded.drafting.model_drafter import ModelDrafter
from tinkercloud.embedded.drafting.text_model_drafter import TextModelDrafter
from tinkercloud.embedded.forward import runners
from tinkercloud.embedded.forward.kv_blocks import BlockPool
from tinkercloud.embedded.forward.runners import NativeRunner
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.version import Version
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.speculative.drafters.drafter import Drafter
from tinkercloud.speculative.drafters.suffix_drafter import SuffixDrafter
from tinkercloud.weights.token_bytes import TokenizerPair
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

pytestmark = pytest.mark.skipif(runners.library() is None, reason="there is no C compiler here")
TEXTS = (
    '[{"id": 1, "name": "item 1"}, {"id": 2, "name": "item 2"}, {"id":',
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\n\ndef",
    "Once upon a time",
    "one two three one two three one",
    "Dear Sir or Madam,\n",
    "- apples\n- pears\n-",
)
LAWS: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "stop_strings": ("\n",)},
)
DRAFTERS = ("off", "suffix", "always-wrong", "random", "model", "head")
TOKENS, FEW_TOKENS = 24, 10  # few: one more than the longest draft and the token behind it
Outputs = list[SampleOutput]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def version(
    request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Version:
    tokenizer = ensure_tokenizer_folder(smollm2_gguf, tmp_path_factory.mktemp("tokenizer"))
    base = BaseModel.load("m", smollm2_gguf, tokenizer, request.param, torch.device("cpu"))
    return Version("v", base, base.weights, None, 1.0)


def drafter_of(version: Version, name: str) -> Drafter:
    """model: the target's own network. head: one that nobody taught, over a part of the tokens."""
    base = version.base
    if name == "model":
        runner = NativeRunner(2)
        pool = BlockPool(base.config, base.dtype, base.device, 64, runner.kv_layout(base))
        return ModelDrafter(version, runner, pool)
    if name == "head":
        return HeadDrafter(TorchHead(*untaught_head(base, range(4096))))
    return trial_table(base.config.vocab_size).make(name)


def requests_of(
    version: Version, batch: int, law: Mapping[str, object], tokens: int = TOKENS
) -> list[SampleRequest]:
    decoder = version.base.decoder
    assert isinstance(decoder, Tokenizer)
    return [
        SampleRequest(
            np.array(decoder.encode(TEXTS[i]).ids, np.int32),
            1,
            SamplingParams(tokens + i, 10 + i, **law),  # type: ignore[arg-type]
        )
        for i in range(batch)
    ]


def new_engine(drafting: Drafting | None) -> SamplingEngine:
    return SamplingEngine(max_batch=8, kv_cache_bytes=2**28, num_threads=2, speculate=drafting)


def sampled(version: Version, requests: list[SampleRequest], drafting: Drafting | None) -> Outputs:
    return sampled_by(new_engine(drafting), version, requests)


def sampled_by(engine: SamplingEngine, version: Version, requests: list[SampleRequest]) -> Outputs:
    outputs: dict[int, SampleOutput | BaseException] = {}
    for i, request in enumerate(requests):
        engine.submit(version, request, lambda one, i=i: outputs.__setitem__(i, one))
    while engine.busy:
        engine.step()
    return [one for i in range(len(requests)) if isinstance(one := outputs[i], SampleOutput)]


def require_same(found: Outputs, expected: Outputs) -> None:
    for a, b in zip(found, expected, strict=True):
        for one, other in zip(a.sequences, b.sequences, strict=True):
            assert np.array_equal(one.tokens, other.tokens)
            assert np.array_equal(one.logprobs, other.logprobs)
            assert one.stop_reason == other.stop_reason


@pytest.mark.parametrize(
    ("batch", "law"),
    [
        pytest.param(1, LAWS[0], marks=pytest.mark.slow),
        (3, LAWS[2]),
        pytest.param(8, LAWS[3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_with_drafts_equal_those_without(
    version: Version, batch: int, law: Mapping[str, object]
) -> None:
    requests = requests_of(version, batch, law, FEW_TOKENS if batch == 8 else TOKENS)
    plain = sampled(version, requests, None)
    for name in DRAFTERS:
        drafting = Drafting(lambda _, name=name: drafter_of(version, name), 5)
        require_same(sampled(version, requests, drafting), plain)


def batches_of(version: Version) -> list[list[SampleRequest]]:
    """One sample of each law by itself, then three and eight at once, of different laws."""
    by_law = [requests_of(version, len(TEXTS), law, FEW_TOKENS) for law in LAWS]
    alone = [[requests[i]] for i, requests in enumerate(by_law)]
    beside = [by_law[i % len(LAWS)][i] for i in range(len(TEXTS))]
    turned = [by_law[(i + 2) % len(LAWS)][i] for i in range(len(TEXTS))]
    return [*alone, beside[:3], turned[:3], beside, turned]


@pytest.fixture(scope="module")
def plain(version: Version) -> list[Outputs]:
    """What the batches are without drafts, each by an engine of its own."""
    return [sampled(version, requests, None) for requests in batches_of(version)]


@pytest.mark.slow
@pytest.mark.parametrize("most", range(9))
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_whole_matrix_of_samples_with_drafts_equals_those_without(
    version: Version, plain: list[Outputs], name: str, most: int
) -> None:
    """One engine, so that a drafter with a memory has one; the last batches come twice."""
    drafting = Drafting(lambda _: drafter_of(version, name), most)
    engine = new_engine(drafting)
    batches = list(zip(batches_of(version), plain, strict=True))
    for requests, expected in (*batches, batches[2], batches[-1]):
        require_same(sampled_by(engine, version, requests), expected)
    if name in ("model", "suffix"):
        assert (drafting.policy.num_accepted > 0) == (most > 0)


def test_repeated_text_takes_few_passes(version: Version) -> None:
    """Greedy, and in a circle: most rounds bring several tokens."""
    requests = requests_of(version, 6, LAWS[0])[5:]
    requests = [SampleRequest(one.prompt, 1, SamplingParams(96, 0, 0.0)) for one in requests]
    drafting = Drafting(lambda size: SuffixDrafter(), 8)
    require_same(sampled(version, requests, drafting), sampled(version, requests, None))
    assert len(drafting.policy.rounds) < 96 / 2


def with_fewer_merges(tokenizer: Tokenizer, num_merges: int) -> Tokenizer:
    """Rarer words are several tokens to it; their own tokens it can still read."""
    told = json.loads(tokenizer.to_str())
    told["model"]["merges"] = told["model"]["merges"][:num_merges]
    return Tokenizer.from_str(json.dumps(told))


@pytest.mark.slow
@pytest.mark.parametrize(("law", "least"), [(LAWS[0], 0.6), (LAWS[2], 0.25)], ids=str)
def test_a_model_that_cuts_words_otherwise_drafts_through_text(
    version: Version, law: Mapping[str, object], least: float
) -> None:
    """The target's own network as its draft, behind a tokenizer with a tenth of the merges."""
    base = version.base
    assert isinstance(base.decoder, Tokenizer)
    own = with_fewer_merges(base.decoder, 5000)
    assert any(own.encode(text).ids != base.decoder.encode(text).ids for text in TEXTS)
    draft = Version("draft", replace(base, name="draft", decoder=own), base.weights, None, 1.0)

    def make(_: int) -> TextModelDrafter:
        runner = NativeRunner(2)
        pool = BlockPool(base.config, base.dtype, base.device, 64, runner.kv_layout(base))
        pair = TokenizerPair.of(base.decoder, own)
        return TextModelDrafter(draft, runner, pool, pair)

    requests, drafting = requests_of(version, 4, law), Drafting(make, 4)
    require_same(sampled(version, requests, drafting), sampled(version, requests, None))
    told = drafting.policy.rounds
    share = drafting.policy.num_accepted / sum(sum(one.num_judged) for one in told)
    assert share > least


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    trace = str(folder / "rounds.jsonl")
    arguments = ("--model", f"m={smollm2_gguf}", "--speculate", "suffix")
    with start_server(*arguments, "--speculate-trace", trace, data_dir=folder / "data") as server:
        yield server


def test_a_server_drafts_by_itself_and_tells_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.sdk_environment.items():
        monkeypatch.setenv(name, value)
    import tinker

    service = tinker.ServiceClient()
    sampler = service.create_sampling_client(base_model="m").result()
    prompt = tinker.ModelInput.from_ints(list(range(100, 120)) * 4)
    params = tinker.SamplingParams(max_tokens=120, temperature=0.0, stop=[])

    def sample() -> Any:
        return sampler.sample(prompt, num_samples=1, sampling_params=params).result()

    answers = [sample() for _ in range(3)]

    def figures() -> Any:
        with server.http() as http:
            return http.get("/health").json().get("speculation", {}).get("m")

    def num_accepted(told: Any) -> int:
        depths = ((told or {}).get("drafters") or {}).get("suffix", {}).get("depths", [])
        return sum(depth["accepted"] for depth in depths)

    def told_after_one_more() -> Any:
        answers.append(sample())
        return figures()

    # Whether drafts pay is judged by times; some are tried in any case.
    wait_for("drafted tokens are accepted", told_after_one_more, num_accepted, poll_s=0.1)
    service.close("success").result()
    first = answers[0].sequences[0]
    assert all(one.sequences[0].tokens == first.tokens for one in answers)
    assert all(one.sequences[0].logprobs == first.logprobs for one in answers)
    told = wait_for(  # they come about once a second
        "there are figures of 300 tokens",
        figures,
        lambda told: told and told["tokens"] >= 300,
        poll_s=0.1,
    )
    with server.http() as http:
        metrics = http.get("/metrics")
    assert num_accepted(told) > 0
    assert told["tokens"] > told["forwards"]
    assert metrics.status_code == 200
    lines = dict(
        line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#")
    )
    assert float(lines["tinkercloud_tokens_sampled"]) >= 360
    assert float(lines["tinkercloud_speculation_tokens_total"]) > 0
    assert all(math.isfinite(float(value)) for value in lines.values())


def test_each_draft_of_a_server_can_be_read(server: Server) -> None:
    """After the test above."""
    lines = (server.data_dir.parent / "rounds.jsonl").read_text().splitlines()
    assert lines
    for told in map(json.loads, lines):
        assert told["drafted"][: told["accepted"]] == told["target"][: told["accepted"]]
