"""The base of every JSON body on the wire."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A JSON body. Unknown fields are ignored, so a newer peer is never refused for them."""

    model_config = ConfigDict(
        extra="ignore",
        protected_namespaces=(),  # model_id, model_name, ... are words of the API
        arbitrary_types_allowed=True,
        serialize_by_alias=True,
        validate_by_name=True,
        validate_by_alias=True,
    )

    def to_json_dict(self) -> dict[str, Any]:
        """The JSON object to send: defaults are sent, None is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})
