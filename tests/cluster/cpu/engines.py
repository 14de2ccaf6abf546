"""Real SGLang servers on a CPU, for tests: which Python runs them, and what keeps them small."""

import json
import os
import secrets
from collections.abc import Sequence
from operator import not_
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.embedded.tiny import EOS, write_tiny_model
from tests.waiting import async_wait_for
from tinkercloud.cluster.base_models import CPU_OPTIONS, ENGINE_ENTRY
from tinkercloud.cluster.rollout.manager import RolloutManager
from tinkercloud.cluster.rollout.settings import RolloutSettings
from tinkercloud.config import stand_ins_variables
from tinkercloud.planning.plan import SglangArguments

ROOT = Path(__file__).resolve().parents[3]
CONTEXT = 1024
LORA_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "lm_head"),
)


def sglang_python() -> str:
    """The interpreter that has SGLang."""
    variable = "TINKERCLOUD_TEST_SGLANG_PYTHON"
    path = os.environ.get(variable, str(ROOT / ".venv-sglang/bin/python"))
    if not Path(path).exists():
        pytest.fail(
            f"there is no {path}: `make test-cluster` installs SGLang there (or name another "
            f"interpreter in {variable})",
            pytrace=False,
        )
    return path


def sglang_command() -> tuple[str, ...]:
    """It finds the code of this checkout, which is not installed there."""
    return ("env", f"PYTHONPATH={ROOT}", sglang_python(), "-m", ENGINE_ENTRY)


def sglang_environment(start_method: Literal["fork", "spawn"] = "fork") -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return threads | stand_ins_variables(start_method)


def arguments(**changes: Any) -> SglangArguments:
    given: dict[str, Any] = {
        "tp_size": 1,
        "nnodes": 1,
        "mem_fraction_static": 0.3,
        "context_length": CONTEXT,
        "max_running_requests": 8,
        "enable_memory_saver": False,
        "enable_weights_cpu_backup": False,
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras_per_batch": 4,
        "lora_target_modules": LORA_MODULES,
        "dtype": "float32",
    }
    return SglangArguments(**given | changes)


def settings(model: Path, logs: Path, **changes: Any) -> RolloutSettings:
    """Keyword arguments go to RolloutSettings; `more_options` come after the CPU's."""
    more: Sequence[str] = changes.pop("more_options", ())
    given: dict[str, Any] = {
        "name": "tiny",
        "model_path": model,
        "arguments": arguments(),
        "eos_token_ids": (EOS,),
        "log_dir": logs,
        "command": sglang_command(),
        "kv_tokens": 4096,
        "options": (*CPU_OPTIONS, *more),
        "environment": sglang_environment(),
        "host": "127.0.0.1",
        "key": f"-{secrets.token_urlsafe(31)}",  # one of 64 begins so; it is no option
        "start_timeout_s": 400.0,  # the machine may have other things to do
        "request_timeout_s": 400.0,
        "health_interval_s": 2.0,
    }
    return RolloutSettings(**given | changes)


def write_served_model(folder: Path, seed: int = 0) -> Path:
    """The tiny model, with what SGLang wants to know of its tokenizer."""
    write_tiny_model(folder, seed)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def logprobs(model: LlamaForCausalLM, tokens: Sequence[int]) -> np.ndarray:
    """transformers' log-probabilities of tokens[1:], float32."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0].float().numpy()


def processes(manager: RolloutManager, index: int = 0) -> list[psutil.Process]:
    """Of an engine: its actor's, the guard, SGLang's server and what it started."""
    import ray

    guard = psutil.Process(ray.get(manager._engines[index].actors[0].process_id.remote()))
    actor = guard.parent()
    assert actor is not None
    return [actor, guard, *guard.children(recursive=True)]


async def wait_until_ended(killed: Sequence[psutil.Process]) -> None:
    await async_wait_for(
        "they have ended",
        lambda: [p for p in killed if p.is_running() and p.status() != psutil.STATUS_ZOMBIE],
        not_,
    )
