"""Adds to FastAPI's OpenAPI document what FastAPI does not serve: the generation routes and the error body.

Their schemas come from the pydantic models that check the bodies, so document and behaviour cannot differ.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .errors import ErrorBody
from .requests import ChatBody, CompletionBody, GenerationBody

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[str, type[GenerationBody]]] = {
    "/v1/chat/completions": ("Answers a conversation, streamed or whole", ChatBody),
    "/v1/completions": ("Continues prompts, streamed or whole", CompletionBody),
}


def install_openapi(app: FastAPI) -> None:
    """Replaces `app.openapi`; the document is built at its first use."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _define(schemas, ErrorBody)
    failure = {"description": "Anything but success", "content": {"application/json": {"schema": _reference(ErrorBody)}}}
    for path, (summary, body) in _BODIES.items():
        _define(schemas, body)
        document["paths"][path] = {"post": _operation(path, summary, body)}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failure
    return document


def _operation(path: str, summary: str, body: type[GenerationBody]) -> dict[str, Any]:
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "tags": ["generation"],
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}},
        "responses": {"200": {"description": "The answer, or its events", "content": answer}},
    }


def _reference(model: type[Any]) -> dict[str, str]:
    return {"$ref": _REF.format(model=_title(model))}


def _define(schemas: dict[str, Any], model: type[Any]) -> None:
    schema = model.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schemas[_title(model)] = schema


def _title(model: type[Any]) -> str:
    return str(model.model_config.get("title", model.__name__))
