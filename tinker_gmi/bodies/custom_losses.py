"""The upload of a custom loss (wire specification, section 7.9)."""

from typing import Any, Literal

from pydantic import Field

from tinker_gmi.bodies.wire_model import WireModel

CustomLossInputRank = Literal[0, 1, 2]
"""0 for a scalar, 1 for (N,), 2 for (N, K)."""


class CustomLossInput(WireModel):
    name: str
    rank: CustomLossInputRank


class CustomLossNode(WireModel):
    """One step of the trace. Arguments are JSON scalars and lists, or objects of one key: `ref`,
    `tuple`, `dict`, `slice`, `ellipsis`, `float`, `dtype`, `device`, `layout`, `memory_format`."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(WireModel):
    format: Literal[1] = 1
    nodes: list[CustomLossNode]

    def to_json_dict(self) -> dict[str, Any]:
        """Here a None is sent: it is an argument."""
        return self.model_dump(mode="json")


class CreateCustomLossRequest(WireModel):
    """inputs and graph as they came: the server checks them node by node."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[Any]
    graph: dict[str, Any]
    type: Literal["create_custom_loss"] = "create_custom_loss"

    def to_json_dict(self) -> dict[str, Any]:
        """Here a None is sent: it is an argument."""
        return self.model_dump(mode="json")


class CreateCustomLossResponse(WireModel):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
