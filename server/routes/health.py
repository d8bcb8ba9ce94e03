"""Who lives and who is ready: /health and /livez never wait for the engine, /readyz says whether a request would be taken."""

from typing import Any

import msgspec
from fastapi import APIRouter

from albatross import __version__
from albatross.engine.client import WorkerStatus

from ..state import ServerState


def health_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["health"])

    def engine_facts() -> dict[str, Any] | None:
        info = state.engine.status.info
        return None if info is None else msgspec.structs.asdict(info)

    @router.get("/health", summary="The process lives; how its engine is")
    async def health() -> dict[str, Any]:
        status = state.engine.status
        return {
            "status": "draining" if state.is_draining else "ok",
            "engine": {"state": status.state, "reason": status.reason, "restarts": status.restarts},
            "workers": [_worker_facts(number, worker) for number, worker in enumerate(status.workers)],
            "model": engine_facts(),
        }

    @router.get("/livez", summary="The process lives")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="A request would be taken; else 503 with the reason")
    async def readyz() -> dict[str, Any]:
        obstacle = state.obstacle()
        if obstacle is not None:
            raise obstacle
        workers = [_worker_facts(number, worker) for number, worker in enumerate(state.engine.status.workers)]
        return {"status": "ready", "not_ready": [worker for worker in workers if worker["state"] != "ready"]}

    @router.get("/version", summary="Versions and what runs the model")
    async def version() -> dict[str, Any]:
        return {"version": __version__, "system_fingerprint": state.fingerprint, "model": engine_facts()}

    return router


def _worker_facts(number: int, worker: WorkerStatus) -> dict[str, Any]:
    return {
        "worker": number,
        "device": None if worker.info is None else worker.info.device,
        "state": worker.state,
        "reason": worker.reason,
        "restarts": worker.restarts,
        "num_running": worker.stats.num_running,
        "num_waiting": worker.stats.num_waiting,
    }
