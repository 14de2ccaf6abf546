"""A JSON schema of tool calls: what a sample must be where the client asks for a call."""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of a call of one of the tools. arguments: the name that the model's format has
    for them."""
    schemas = {f"tool{i}": tool["function"].get("parameters") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments: {"$ref": f"#/$defs/{place}"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, schemas, strict=True)
    ]
    definitions = {
        place: _moved(_of_object(schema), f"#/$defs/{place}") for place, schema in schemas.items()
    }
    return {"anyOf": calls, "$defs": definitions}


def _of_object(schema: Schema | None) -> Schema:
    """Arguments are an object also where the tool does not say so."""
    return {"type": "object", "properties": {}} if not schema else {"type": "object", **schema}


def _moved(value: Any, root: str) -> Any:
    """The same schema inside another document: references to its root follow it."""
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(item, root) for key, item in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#")
    return moved
