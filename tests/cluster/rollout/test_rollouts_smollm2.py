"""SmolLM2-135M in a real SGLang server: real weights, a large vocabulary, tied embeddings."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.cluster.cpu.engines import arguments, logprobs, settings
from tests.cluster.ray_cluster import one_node
from tests.embedded.tiny import ask
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.core.types import LoraSpec
from tinkercloud.weights.adapters import Adapter, fresh_adapter, save_adapter
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

# First light on the cluster runs SmolLM2 through the whole of it.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LIMIT = 2e-5
TEXT = "A lighthouse keeper writes down the weather every morning: wind from the west, rain"


@dataclass
class Bench:
    manager: RolloutManager
    model: LlamaForCausalLM
    prompt: list[int]
    folder: Path


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("smollm2")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    model.save_pretrained(folder)
    described = ensure_tokenizer_folder(smollm2_gguf, tmp_path_factory.mktemp("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(described)
    tokenizer.save_pretrained(folder)
    small = arguments(max_lora_rank=8, max_loras_per_batch=2)
    told = settings(folder, tmp_path_factory.mktemp("logs"), arguments=small, router=False)
    manager = RolloutManager(told, [()])
    await manager.start()
    yield Bench(manager, model, tokenizer.encode(TEXT), folder)
    await manager.stop()


async def test_prompt_logprobs_are_those_of_transformers(bench):
    request = ask(bench.prompt, max_tokens=1, prompt_logprobs=True)
    output = await bench.manager.generate(None, request)
    expected = logprobs(bench.model, bench.prompt)
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=LIMIT, rtol=0)


async def test_sampled_tokens_score_under_transformers_as_reported(bench):
    output = await bench.manager.generate(None, ask(bench.prompt, n=2, max_tokens=16, seed=5))
    for sequence in output.sequences:
        tokens = [*bench.prompt, *sequence.tokens.tolist()]
        expected = logprobs(bench.model, tokens)[-len(sequence.tokens) :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=LIMIT, rtol=0)


async def test_an_adapter_of_every_module_is_served_on_tied_embeddings(bench, tmp_path):
    """The adapter of the unembedding changes what is read out, not what is read in."""
    spec = LoraSpec(rank=8, seed=3)
    linear = {n: m for n, m in bench.model.named_modules() if isinstance(m, torch.nn.Linear)}
    shapes = {name: (m.out_features, m.in_features) for name, m in linear.items()}
    adapter = {
        name: (a, torch.randn_like(b) * 0.01)
        for name, (a, b) in fresh_adapter(spec, shapes, torch.device("cpu")).items()
    }
    assert "lm_head" in adapter
    save_adapter(adapter, spec, "smollm2", tmp_path)
    await bench.manager.load_adapter("all", tmp_path)
    request = ask(bench.prompt, n=2, max_tokens=12, seed=7, prompt_logprobs=True)
    base = await bench.manager.generate(None, request)
    output = await bench.manager.generate("all", request)
    with added(linear, adapter, spec.alpha / spec.rank):
        for sequence in output.sequences:
            tokens = [*bench.prompt, *sequence.tokens.tolist()]
            expected = logprobs(bench.model, tokens)
            reported = [*output.prompt_logprobs[1:], *sequence.logprobs]
            np.testing.assert_allclose(reported, expected, atol=LIMIT, rtol=0)
    assert np.abs(output.prompt_logprobs[1:] - base.prompt_logprobs[1:]).max() > 0.05


class added:
    """W x + scale B A x in these modules for the length of the block."""

    def __init__(self, linear: dict[str, torch.nn.Linear], adapter: Adapter, scale: float):
        self._given = [(linear[name], a, b * scale) for name, (a, b) in adapter.items()]
        self._hooks = []

    def __enter__(self) -> None:
        for module, a, b in self._given:
            self._hooks.append(
                module.register_forward_hook(
                    lambda _, args, out, a=a, b=b: out + args[0] @ a.T @ b.T
                )
            )

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
