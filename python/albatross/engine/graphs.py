"""CUDA graphs of the whole decode step: one replay in the place of hundreds of launches, one graph a padded number of rows.

A graph takes slots and nothing else: it reads what they drew last, runs the model and draws. A step of R rows replays the
smallest graph with at least R rows; the rest are padding (slot -1), which leaves no trace. Knows nothing of requests;
`model_runner` uses it for steps without prompts.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence

import torch

from albatross.engine.sampler import Sampler
from albatross.engine.staging import Staging
from albatross.models.rwkv7 import RWKV7
from albatross.models.state_pool import StatePool

logger = logging.getLogger(__name__)

_FINE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STRIDES = ((256, 32), (512, 64), (1 << 30, 128))  # up to so many rows, a graph every so many
_WARM_UPS = 2  # runs before a capture, in which libraries make their handles and choose their kernels
_PADDING_SLOT = -1


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to capture, ascending; the last is `max_rows` itself."""
    sizes = list(_FINE_SIZES)
    for limit, stride in _STRIDES:
        sizes += range(sizes[-1] + stride, min(limit, max_rows) + 1, stride)
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


class DecodeGraphs:
    """All graphs of one model, pool and sampler, with their buffers: made at construction, which may run out of memory."""

    def __init__(self, model: RWKV7, pool: StatePool, sampler: Sampler, max_rows: int, depth: int) -> None:
        """depth: steps that may be in flight at once."""
        device = model.device
        free, _ = torch.cuda.mem_get_info(device)
        started = time.monotonic()
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._staging = Staging(max_rows, device, depth)
        self._slots = torch.full((max_rows,), _PADDING_SLOT, dtype=torch.int32, device=device)
        self._bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._logits = torch.empty(max_rows, model.config.vocab_size, device=device)
        self._capture_all(model, pool, sampler)
        left, _ = torch.cuda.mem_get_info(device)
        logger.info(
            "captured %d decode graphs of up to %d rows in %.1f s, %.2f GiB, %.2f GiB left",
            len(self._sizes), max_rows, time.monotonic() - started, (free - left) / 2**30, left / 2**30,
        )  # fmt: skip

    def run(self, slots: Sequence[int]) -> torch.Tensor:
        """One decode step of these slots: each draws its next token, and its state is advanced.

        Returns the raw logits [R, V] float32, which the next call overwrites. Nothing waits for the device.
        """
        num_rows = len(slots)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        self._staging.upload((slots, [_PADDING_SLOT] * (size - num_rows)), out=self._slots)
        self._graphs[size].replay()
        return self._logits[:num_rows]

    def _capture_all(self, model: RWKV7, pool: StatePool, sampler: Sampler) -> None:
        """The largest first, so that the smaller ones find room in its memory. All rows are padding meanwhile."""
        memory = None
        for number, size in enumerate(reversed(self._sizes), start=1):
            logger.info("capturing decode graph %d of %d (%d rows)", number, len(self._sizes), size)
            for _ in range(_WARM_UPS):
                self._step(model, pool, sampler, size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._step(model, pool, sampler, size)
            memory = memory or graph.pool()
            self._graphs[size] = graph

    def _step(self, model: RWKV7, pool: StatePool, sampler: Sampler, size: int) -> None:
        slots = self._slots[:size]
        token_ids = sampler.last_token.index_select(0, slots.clamp(min=0))
        rows, bounds, logits = self._rows[:size], self._bounds[: size + 1], self._logits[:size]
        model.forward(token_ids, bounds, slots, rows, pool, is_decode=True, out=logits)
        sampler.draw(logits, slots)
