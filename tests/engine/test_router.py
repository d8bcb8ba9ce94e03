"""Who gets the next request, and what several workers are together: plain numbers, no process."""

import pytest

from albatross.engine.messages import EngineStats
from albatross.engine.router import Router
from albatross.engine.status import State, WorkerStatus, combine

NO_STATS = EngineStats()


def worker(
    state: State = "ready", reason: str | None = None, stats: EngineStats = NO_STATS, restarts: int = 0
) -> WorkerStatus:
    return WorkerStatus(state, reason, None, stats, restarts)


def test_the_least_loaded_worker_is_asked_first_and_the_busiest_last() -> None:
    assert Router(4).order([7, 2, 9, 5]) == [1, 3, 0, 2]


def test_equals_take_turns() -> None:
    router = Router(3)
    assert [router.order([4, 4, 4])[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_turn_is_counted_from_the_worker_that_was_asked_last_whatever_the_reason() -> None:
    router = Router(3)
    assert router.order([4, 0, 4])[0] == 1
    assert router.order([4, 4, 4]) == [2, 0, 1]


def test_a_worker_that_takes_nothing_is_passed_over() -> None:
    router = Router(3)
    assert [router.order([3, None, 3])[0] for _ in range(4)] == [0, 2, 0, 2]
    assert router.order([None, None, 50]) == [2]
    assert router.order([None, None, None]) == []


def test_requests_of_equal_size_spread_evenly() -> None:
    router, loads = Router(8), [0] * 8
    for _ in range(800):
        loads[router.order(loads)[0]] += 1
    assert loads == [100] * 8


def test_a_worker_that_comes_back_empty_is_filled_up_first() -> None:
    router, loads = Router(3), [10, 0, 10]
    for _ in range(10):
        loads[router.order(loads)[0]] += 1
    assert loads == [10, 10, 10]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("ready", "ready"), "ready"),
        (("failed", "ready"), "ready"),
        (("restarting", "loading"), "loading"),
        (("restarting", "restarting"), "restarting"),
        (("failed", "stopped"), "failed"),
        (("stopped", "stopped"), "stopped"),
    ],
)
def test_the_engine_is_as_well_as_its_best_worker(states: tuple[State, State], expected: State) -> None:
    assert combine([worker(state) for state in states]).state == expected


def test_the_reason_names_the_workers_that_are_not_ready() -> None:
    assert combine([worker(), worker()]).reason is None
    assert combine([worker("loading", "the model is loading")] * 2).reason == "the model is loading"
    two_of_three = combine([worker("restarting", "it died"), worker(), worker("loading", "the model is loading")])
    assert two_of_three.reason == "worker 0 is restarting: it died; worker 2 is loading: the model is loading"


def test_counts_are_summed_and_the_slowest_step_is_kept() -> None:
    workers = [
        worker(stats=EngineStats(num_running=3, num_waiting=1, generated_tokens=10, step_ms=2.0), restarts=1),
        worker(stats=EngineStats(num_running=4, num_waiting=0, generated_tokens=5, step_ms=7.0), restarts=2),
    ]
    status = combine(workers)
    assert status.stats == EngineStats(num_running=7, num_waiting=1, generated_tokens=15, step_ms=7.0)
    assert (status.restarts, status.workers) == (3, tuple(workers))
