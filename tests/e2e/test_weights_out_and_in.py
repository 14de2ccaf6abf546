"""Weights out, loaded by PEFT, in again: by the official SDK, on real and tiny weights.

SmolLM2 has tied embeddings, the tiny Llama has not; both adapters are of all modules, the
unembedding included.
"""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tinker_cookbook import weights as cookbook_weights
from transformers import AutoModelForCausalLM

from tests.e2e.clients import MODEL, Client, logprobs_of
from tests.embedded.tiny import write_tiny_model
from tests.serving import QUIET, ROOT, Server, start_server

TINY = "tiny/llama"
TOKENS = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101, 44, 32, 121, 111, 117]
# Float32 on both sides; what is left is the order of sums.
CLOSE = 2e-4


@dataclass(frozen=True)
class Stand:
    """A server with both models, the SDK on it, and the folders that transformers loads."""

    server: Server
    client: Client
    rest: tinker.RestClient
    sources: dict[str, Path]
    folders: dict[str, Path]

    def base(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folders[name], dtype=torch.float32).eval()

    def import_adapter(self, folder: Path, name: str, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tinkercloud", "import", str(folder)]
        command += ["--base-model", name, "--model", f"{name}={self.sources[name]}", *options]
        command += ["--data-dir", str(self.server.data_dir)]
        environment = {**QUIET, "PYTHONPATH": str(ROOT), "PATH": ""}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=300
        )

    def imported(self, folder: Path, name: str, *options: str) -> str:
        run = self.import_adapter(folder, name, *options)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()


@pytest.fixture(scope="module")
def stand(
    smollm2_gguf: Path, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    root = tmp_path_factory.mktemp("weights")
    tiny = write_tiny_model(root / "tiny")
    sources = {MODEL: smollm2_gguf, TINY: tiny}
    folders = {MODEL: smollm2_folder, TINY: tiny}
    served = [text for name, path in sources.items() for text in ("--model", f"{name}={path}")]
    with start_server(*served, "--dtype", "float32", data_dir=root / "data") as server:
        client = Client.connect(tinker, server)
        rest = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
        yield Stand(server, client, rest, sources, folders)
        client.close()


def trained(stand: Stand, name: str, rank: int = 4) -> Any:
    """A model that no longer is the base: two large steps."""
    model = stand.client.service.create_lora_training_client(name, rank=rank, seed=3).result()
    for _ in range(2):
        stand.client.train(model, [stand.client.supervised(TOKENS)], learning_rate=5e-3)
    return model


def downloaded(stand: Stand, path: str, folder: Path) -> Path:
    folder.mkdir()
    for name, url in stand.rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, folder / name)
    return folder


def sampler_logprobs(stand: Stand, path: str) -> np.ndarray:
    sampler = stand.client.service.create_sampling_client(model_path=path).result()
    return np.array(sampler.compute_logprobs(stand.client.prompt(TOKENS)).result()[1:])


def torch_logprobs(model: Any) -> np.ndarray:
    """log p of each token but the first, by transformers."""
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", [pytest.param(MODEL, marks=pytest.mark.slow), TINY])
def test_an_export_loads_in_peft_with_equal_logits_and_comes_in_again(
    stand: Stand, name: str, tmp_path: Path
) -> None:
    model = trained(stand, name)
    exported = model.save_weights_external("out").result().path
    trainer = logprobs_of(
        model.forward([stand.client.supervised(TOKENS)], "cross_entropy").result()
    )
    sampler = model.save_weights_for_sampler("out").result().path
    logprobs = sampler_logprobs(stand, sampler)
    folder = downloaded(stand, exported, tmp_path / "out")

    base = stand.base(name)
    before = torch_logprobs(base)
    in_peft = torch_logprobs(PeftModel.from_pretrained(base, folder).eval())
    assert np.abs(before - in_peft).max() > 0.5  # the adapter does something
    assert np.abs(in_peft - logprobs).max() < CLOSE
    assert np.abs(in_peft - trainer).max() < CLOSE

    again = stand.imported(folder, name, "--name", "again")
    assert np.array_equal(sampler_logprobs(stand, again), logprobs)
    resumed = stand.client.service.create_training_client_from_state(again).result()
    second = resumed.save_weights_external("second").result().path
    tensors, same = (
        load_file(f / "adapter_model.safetensors")
        for f in (folder, downloaded(stand, second, tmp_path / "second"))
    )
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[key], same[key]) for key in tensors)
    config = (folder / "adapter_config.json").read_text()
    assert (tmp_path / "second" / "adapter_config.json").read_text() == config


CONFIGS = {
    "all linear modules": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "with the unembedding": LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "down_proj", "lm_head"]
    ),
    "two modules of one layer": LoraConfig(
        r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"], layers_to_transform=[1]
    ),
    "patterns": LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"v_proj": 2, r"model\.layers\.0\.mlp\.up_proj": 7},
        alpha_pattern={"up_proj": 3},
    ),
    "rank-stabilized": LoraConfig(
        r=3, lora_alpha=5, target_modules=["k_proj", "o_proj"], use_rslora=True
    ),
}


def peft_adapter(base: Any, config: LoraConfig, folder: Path) -> Any:
    """A model with random weights in A and B, saved by PEFT."""
    torch.manual_seed(5)
    config.task_type, config.init_lora_weights = "CAUSAL_LM", False
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "patterns")) for kind in CONFIGS],
)
def test_an_adapter_of_peft_is_imported_and_sampled(
    stand: Stand, kind: str, tmp_path: Path
) -> None:
    base = stand.base(TINY)
    before = torch_logprobs(base)
    expected = torch_logprobs(peft_adapter(base, CONFIGS[kind], tmp_path))
    path = stand.imported(tmp_path, TINY)
    assert np.abs(before - expected).max() > 0.05
    assert np.abs(sampler_logprobs(stand, path) - expected).max() < CLOSE
    model = stand.client.service.create_training_client_from_state(path).result()
    loss = stand.client.train(model, [stand.client.supervised(TOKENS)]).metrics["loss:sum"]
    assert loss == pytest.approx(-expected.sum(), abs=1e-2)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_peft_of_tied_embeddings_is_imported(stand: Stand, tmp_path: Path) -> None:
    base = stand.base(MODEL)
    config = LoraConfig(r=2, lora_alpha=1, target_modules=["v_proj", "lm_head"])
    expected = torch_logprobs(peft_adapter(base, config, tmp_path))
    path = stand.imported(tmp_path, MODEL)
    assert np.abs(sampler_logprobs(stand, path) - expected).max() < CLOSE


def test_an_imported_checkpoint_is_its_users_alone(stand: Stand, tmp_path: Path) -> None:
    peft_adapter(stand.base(TINY), CONFIGS["rank-stabilized"], tmp_path)
    path = stand.imported(tmp_path, TINY, "--user", "bob", "--name", "mine")
    paths = {c.tinker_path for c in stand.rest.list_user_checkpoints().result().checkpoints}
    assert path not in paths
    with pytest.raises(tinker.NotFoundError):
        stand.rest.get_weights_info_by_tinker_path(path).result()


def test_the_import_of_what_cannot_be_represented_is_refused(stand: Stand, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    peft_adapter(stand.base(TINY), config, tmp_path)
    run = stand.import_adapter(tmp_path, TINY)
    assert (run.returncode, run.stdout) == (1, "")
    assert "use_dora: DoRA scales the rows of the whole weight" in run.stderr
    unknown = stand.import_adapter(tmp_path, TINY, "--base-model", "other/model")
    assert "no model 'other/model' here; known: tiny/llama" in unknown.stderr


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # what the cookbook calls
@pytest.mark.filterwarnings("ignore:Using the future as the TrainingClient:FutureWarning")
def test_the_cookbook_downloads_training_weights_encrypted(stand: Stand, tmp_path: Path) -> None:
    model = trained(stand, TINY)
    path = model.save_state("state").result().path
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stand.server.sdk_environment.items():
            patch.setenv(name, value)
        cookbook_weights.download(
            tinker_path=path, output_dir=str(tmp_path / "out"), base_url=stand.server.base_url
        )
    exported = model.save_weights_external("plain").result().path
    plain = downloaded(stand, exported, tmp_path / "plain")
    names = sorted(f.name for f in plain.iterdir())
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()
    listed = stand.rest.list_user_checkpoints().result().checkpoints
    assert not [c for c in listed if c.checkpoint_id == "external_weights/download"]


def test_full_weights_are_exported_as_a_hugging_face_folder(stand: Stand, tmp_path: Path) -> None:
    model = trained(stand, TINY, rank=0)
    exported = model.save_weights_external("full").result().path
    logprobs = sampler_logprobs(stand, model.save_weights_for_sampler("full").result().path)
    folder = downloaded(stand, exported, tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    assert np.abs(torch_logprobs(loaded) - logprobs).max() < CLOSE
    assert (folder / "tokenizer.json").read_bytes() == (
        stand.folders[TINY] / "tokenizer.json"
    ).read_bytes()
