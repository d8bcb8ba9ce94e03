"""Which worker takes the next request: the one with the fewest streams, equals in turn.

Plain numbers in, an order out; knows no processes, no messages and no text. Called by `client`, once a prompt.
"""

from collections.abc import Sequence


class Router:
    """Remembers only whose turn it is among workers that are equally busy."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._turn = 0

    def order(self, loads: Sequence[int | None]) -> list[int]:
        """The workers to ask, the first one first. `loads` holds each one's streams, or None if it takes nothing at all."""
        busy = {worker: load for worker, load in enumerate(loads) if load is not None}
        ranked = sorted(busy, key=lambda worker: (busy[worker], (worker - self._turn) % self._num_workers))
        if ranked:
            self._turn = ranked[0] + 1
        return ranked
