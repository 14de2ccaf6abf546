"""Optimizers: the family that a model is created with, and the parameters of one step."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from tinker_gmi.bodies.wire_model import WireModel


class OptimizerConfig(WireModel):
    """The family of a model's optimizer, by its `type`; further fields are kept."""

    model_config = ConfigDict(extra="allow")
    type: str


class AdamOptimizerConfig(OptimizerConfig):
    """AdamW, the default."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["adamw"] = "adamw"  # type: ignore[assignment]


class DimuonOptimizerConfig(OptimizerConfig):
    """Of the hosted service alone: its definition is not published, and our server refuses it."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["dimuon"] = "dimuon"  # type: ignore[assignment]
    version: Literal[1] = 1


class AdamParams(WireModel):
    """AdamW with decoupled weight decay; grad_clip_norm 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class FamilyParams(WireModel):
    """The parameters of one step of an optimizer other than AdamW, by its `type`."""

    model_config = ConfigDict(extra="allow")
    type: str


class DimuonParams(FamilyParams):
    """grad_clip_norm of 0 or less does not clip; beta1: decay of the momentum's average."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["dimuon"] = "dimuon"  # type: ignore[assignment]
    learning_rate: float = Field(ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)


OptimParams = AdamParams | FamilyParams


def adamw() -> dict[str, Any]:
    """What a model is created with where nothing else is said."""
    return AdamOptimizerConfig().to_json_dict()
