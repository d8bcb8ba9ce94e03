"""GET /metrics in Prometheus' text format."""

from fastapi import APIRouter, Response

from ..metrics import CONTENT_TYPE
from ..state import ServerState


def metrics_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)

    return router
