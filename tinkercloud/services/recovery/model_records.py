"""A model's record, from what a client asks for."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinker_gmi.types import LoraConfig
from tinkercloud.core.types import LoraSpec
from tinkercloud.errors import InvalidRequest
from tinkercloud.services.common.numbers import checked
from tinkercloud.services.common.user_metadata import accepted
from tinkercloud.storage.metadata import LoraRecord, Model

MAX_RANK = 1024
MAX_MODEL_SEQ_ID = 10**9


def new_model(
    user: str, session_id: str, model_seq_id: int, base_model: str, lora: LoraRecord
) -> Model:
    checked("model_seq_id", model_seq_id, lowest=0, highest=MAX_MODEL_SEQ_ID)
    now = time.time()
    # A client that creates a model from a checkpoint computes this id itself (wire specification,
    # section 3.1).
    model_id = f"{session_id}:train:{model_seq_id}"
    return Model(model_id, user, session_id, base_model, lora, {}, now, now)


def with_metadata(model: Model, user_metadata: Mapping[str, Any] | None) -> Model:
    return replace(model, user_metadata=accepted(user_metadata))


def lora_record(config: LoraConfig) -> LoraRecord:
    checked("lora_config.rank", config.rank, lowest=0, highest=MAX_RANK)
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidRequest("lora_config trains nothing; set at least one train_* to true")
    seed = secrets.randbits(63) if config.seed is None else config.seed % 2**63
    return LoraRecord(config.rank, seed, config.train_attn, config.train_mlp, config.train_unembed)


def lora_spec(lora: LoraRecord) -> LoraSpec:
    return LoraSpec(
        lora.rank,
        lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def check_optimizer(config: Mapping[str, Any] | None) -> None:
    family = "adamw" if config is None else config.get("type", "adamw")
    if family == "dimuon":
        raise InvalidRequest(
            "optimizer 'dimuon' is not offered: its definition is not published; create the model "
            "with AdamOptimizerConfig(), the default, and step with AdamParams"
        )
    if family != "adamw":
        raise InvalidRequest(
            f"optimizer {str(family)[:100]!r} is not offered; this server trains with adamw"
        )
