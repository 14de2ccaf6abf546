"""What transformers and PEFT do on the same GPU with the same weights, for benchmarks/gpu.py."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.gpu_work import RANK, Trained, allocated_bytes, peak_bytes, synchronize
from tinkercloud.architectures.config import ArchitectureConfig
from tinkercloud.embedded.model.base_model import BaseModel

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_TRAINED, NUM_DECODED = 3, 32  # steps; the shortest training step counts


def as_transformers(base: BaseModel) -> torch.nn.Module:
    """A Qwen3 with the base's weights, on its device and in its type."""
    from transformers import AutoModelForCausalLM

    with base.device:
        model = AutoModelForCausalLM.from_config(_config(base.config), dtype=base.dtype).eval()
    model.load_state_dict({f"{name}.weight": tensor for name, tensor in base.weights.items()})
    return model


def _config(c: ArchitectureConfig):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, head_dim=c.head_dim,
        num_key_value_heads=c.num_kv_heads, tie_word_embeddings=c.tie_word_embeddings,
        max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        attn_implementation="sdpa",
    )  # fmt: skip


@torch.inference_mode()
def decode_step_s(model: torch.nn.Module, num_seqs: int, context: int) -> float:
    """Seconds of a step of `generate`, drawn from the whole vocabulary: of NUM_DECODED + 1 new
    tokens less those of one."""
    device = next(model.parameters()).device
    size = model.config.vocab_size
    prompts = torch.randint(size, (num_seqs, context), generator=torch.Generator().manual_seed(6))
    prompts = prompts.to(device)
    model.generation_config.eos_token_id = None
    draw = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    taken = []
    for num_tokens in (2, 1, NUM_DECODED + 1):  # the first is not counted
        synchronize(device)
        start = time.perf_counter()
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, **draw
        )
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return (taken[2] - taken[1]) / NUM_DECODED


def trained(model: torch.nn.Module, rows: Sequence[np.ndarray]) -> Iterator[Trained]:
    """PEFT's LoRA of all linear layers, all rows in one batch, with and without gradient
    checkpoints. A variant for which there is too little memory is left out."""
    from peft import LoraConfig, get_peft_model

    before = allocated_bytes(next(model.parameters()).device)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=MODULES)
    for variant in ("PEFT", "PEFT, checkpoints"):
        peft = get_peft_model(model, config)
        peft.train()
        if variant != "PEFT":
            peft.enable_input_require_grads()
            peft.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield _trained(variant, peft, rows, before)
        except torch.OutOfMemoryError:
            peft.zero_grad()
        model = peft.unload()  # the next variant begins with an adapter of its own


def _trained(
    variant: str, model: torch.nn.Module, rows: Sequence[np.ndarray], before: int
) -> Trained:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    tokens = torch.from_numpy(np.stack(rows)).to(params[0].device)
    device, losses, taken = tokens.device, [], []
    allocated_bytes(device)  # the peak of this variant alone
    for _ in range(NUM_TRAINED):
        synchronize(device)
        start = time.perf_counter()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        loss.backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return Trained(variant, min(taken), peak_bytes(device) - before, losses[0])
