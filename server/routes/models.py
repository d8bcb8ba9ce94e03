"""GET /v1/models and /v1/models/{id}: the one model this server has."""

from typing import Any

from fastapi import APIRouter

from ..plan import check_model
from ..state import ServerState


def models_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["models"])
    limits = state.engine_config

    def entry() -> dict[str, Any]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": state.created,
            "owned_by": "albatross",
            "root": limits.model_path.name,
            "parent": None,
            "max_model_len": limits.max_prompt_tokens + limits.max_output_tokens,
        }

    @router.get("/v1/models", summary="The served models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    @router.get("/v1/models/{model:path}", summary="One served model")
    async def get_model(model: str) -> dict[str, Any]:
        check_model(model, state.model_name)
        return entry()

    return router
