"""The upload of a custom loss (wire specification, section 7.9)."""

from typing import Any, Literal

from tinker_gmi.bodies.wire_model import WireModel


class CreateCustomLossRequest(WireModel):
    """inputs and graph as they came: the server checks them node by node."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[Any]
    graph: dict[str, Any]
    type: Literal["create_custom_loss"] = "create_custom_loss"
