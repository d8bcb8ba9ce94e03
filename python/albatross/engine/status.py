"""How the workers are, and what that makes of the engine as a whole: plain data and one function over it.

Knows no processes. Written by `supervisor`, joined by `client`, read by the server's health and metrics.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from albatross.engine.messages import EngineReady, EngineStats

State = Literal["loading", "ready", "restarting", "failed", "stopped"]
_BEST_FIRST: tuple[State, ...] = ("ready", "loading", "restarting", "failed", "stopped")


class WorkerStatus(msgspec.Struct, frozen=True):
    """How one engine process is: `reason` says why it is not ready, `info` describes the last one that was."""

    state: State
    reason: str | None
    info: EngineReady | None
    stats: EngineStats
    restarts: int


class EngineStatus(msgspec.Struct, frozen=True):
    """How all workers together are: ready as long as one is. `reason` names those that are not; stats and restarts are sums."""

    state: State
    reason: str | None
    info: EngineReady | None
    stats: EngineStats
    restarts: int
    workers: tuple[WorkerStatus, ...]


def combine(workers: Sequence[WorkerStatus]) -> EngineStatus:
    states = {worker.state for worker in workers}
    return EngineStatus(
        state=next(state for state in _BEST_FIRST if state in states),
        reason=_reason(workers),
        info=next((worker.info for worker in workers if worker.info is not None), None),
        stats=_total([worker.stats for worker in workers]),
        restarts=sum(worker.restarts for worker in workers),
        workers=tuple(workers),
    )


def _reason(workers: Sequence[WorkerStatus]) -> str | None:
    reasons = {worker.reason for worker in workers}
    if len(reasons) == 1:
        return reasons.pop()
    away = [(number, worker) for number, worker in enumerate(workers) if worker.state != "ready"]
    return "; ".join(f"worker {number} is {worker.state}: {worker.reason}" for number, worker in away)


def _total(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; of the times of the last steps, the longest."""
    names = [name for name in EngineStats.__struct_fields__ if name != "step_ms"]
    sums = {name: sum(getattr(each, name) for each in stats) for name in names}
    return EngineStats(**sums, step_ms=max(each.step_ms for each in stats))
