"""The OpenAPI document: made of the routes and the wire types, and given to every key holder."""

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tinker_gmi.types import ForwardBackwardRequest, ForwardRequest
from tinkercloud.routers.deps import OPEN_PATHS, SIGNED_PREFIX, UserDep, json_answer

router = APIRouter()

DOCUMENT_PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "description": "refused; docs/api.md has the statuses",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


@router.get(DOCUMENT_PATH, include_in_schema=False)
async def api_document(user: UserDep, request: Request) -> Response:
    """OpenAPI 3.1."""
    app = request.app
    assert isinstance(app, FastAPI)
    if app.openapi_schema is None:
        app.openapi_schema = await asyncio.to_thread(_document, app)
    return json_answer(app.openapi_schema)


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version="1",
        routes=app.routes,
        description="The Tinker training API, and the APIs of OpenAI and Anthropic for sampling.",
    )
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's form of a refusal, not ours
        schemas.pop(name, None)
    schemes = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
    document["components"]["securitySchemes"] = schemes
    document["security"] = [{"key": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = _ERROR
            if path in OPEN_PATHS or path.startswith(SIGNED_PREFIX):
                operation["security"] = []
    training = {"forward_backward": ForwardBackwardRequest, "forward": ForwardRequest}
    for name, model in training.items():
        operation = document["paths"][f"/api/v1/{name}"]["post"]
        operation["requestBody"] = _training_body(model, schemas, with_protobuf=name != "forward")
    return document


def _training_body(
    model: type[BaseModel], schemas: dict[str, Any], *, with_protobuf: bool
) -> dict[str, Any]:
    """Of routes that read their body themselves."""
    schema = model.model_json_schema(ref_template=_REFERENCE)
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    content: dict[str, Any] = {
        "application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
    }
    if with_protobuf:
        content["application/x-protobuf"] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": True, "content": content}
