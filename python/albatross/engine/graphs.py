"""CUDA graphs of the decode step: one replay in the place of hundreds of launches, one graph a padded number of rows.

A step of R rows replays the smallest graph with at least R rows; the rest are padding (slot -1), which leaves no trace.
Knows nothing of requests; `model_runner` uses it for steps in which every row has one token.
"""

import logging
import time

import torch
from torch import Tensor

from albatross.errors import ConfigError
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
    """All graphs of one model and pool, captured at construction. Raises ConfigError if the card's memory does not suffice."""

    def __init__(self, model: RWKV7, pool: StatePool, max_rows: int) -> None:
        self._sizes = graph_sizes(max_rows)
        device = model.device
        self._token_ids = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._slots = torch.full((max_rows,), _PADDING_SLOT, dtype=torch.int32, device=device)
        self._bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._logits = torch.empty(max_rows, model.config.vocab_size, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        free, _ = torch.cuda.mem_get_info(device)
        started = time.monotonic()
        try:
            self._capture_all(model, pool)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"Capturing decode graphs of up to {max_rows} rows did not fit into the {free / 2**30:.2f} GiB free on {device}; "
                "lower max_num_seqs, or switch cuda_graphs off."
            ) from None
        left, _ = torch.cuda.mem_get_info(device)
        logger.info(
            "captured %d decode graphs of up to %d rows in %.1f s, %.2f GiB, %.2f GiB left",
            len(self._sizes), max_rows, time.monotonic() - started, (free - left) / 2**30, left / 2**30,
        )  # fmt: skip

    def run(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """One decode step. token_ids: [R] int64, slots: [R] int32, both on the host. Returns logits [R, V] float32, which
        the next call overwrites; the states of `slots` are advanced."""
        num_rows = len(slots)
        size = next(size for size in self._sizes if size >= num_rows)
        self._token_ids[:num_rows].copy_(token_ids)
        self._slots[:num_rows].copy_(slots)
        self._slots[num_rows:size].fill_(_PADDING_SLOT)
        self._graphs[size].replay()
        return self._logits[:num_rows]

    def _capture_all(self, model: RWKV7, pool: StatePool) -> None:
        """The largest first, so that the smaller ones find room in its memory."""
        memory = None
        for number, size in enumerate(reversed(self._sizes), start=1):
            logger.info("capturing decode graph %d of %d (%d rows)", number, len(self._sizes), size)
            for _ in range(_WARM_UPS):
                self._forward(model, pool, size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._forward(model, pool, size)
            memory = memory or graph.pool()
            self._graphs[size] = graph

    def _forward(self, model: RWKV7, pool: StatePool, size: int) -> None:
        logits = model.forward(
            self._token_ids[:size], self._bounds[: size + 1], self._slots[:size], self._rows[:size], pool, is_decode=True
        )
        self._logits[:size].copy_(logits)
