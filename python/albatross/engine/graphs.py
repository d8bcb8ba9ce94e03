"""CUDA graphs of the whole step: one replay in the place of hundreds of launches.

Two families. Decode graphs, one a padded number of rows, take slots and nothing else: they read what those drew last, run the
model and draw. Mixed graphs, one a padded number of tokens, take rows of any length: decoding rows and chunks of prompts. A step
replays the smallest graph that holds it; the rest is padding, which leaves no trace. Knows nothing of requests; `model_runner`
uses it.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from albatross.engine.pacing import Timing
from albatross.engine.packing import NOTHING, PADDING_SLOT, Packed
from albatross.engine.sampler import Sampler
from albatross.engine.sizes import graph_sizes, mixed_sizes, padded_size
from albatross.engine.staging import Staging
from albatross.models.rwkv7 import RWKV7
from albatross.models.state_pool import StatePool

logger = logging.getLogger(__name__)

_WARM_UPS = 2  # runs before a capture, in which libraries make their handles and choose their kernels


def mixed_step(
    model: RWKV7,
    pool: StatePool,
    sampler: Sampler,
    packed: Sequence[Tensor],
    is_decode: bool,
    out: Tensor | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """Runs the model over a packed step whose columns (see `Packed`) are int32 on the device, and draws.

    Returns the raw logits of the draws, [K, V] float32; out: where they go. normed: see `RWKV7.forward`.
    """
    tokens, bounds, slots, logits_index, draws = packed
    drawn = sampler.last_token.index_select(0, (-1 - tokens).clamp(min=0))
    token_ids = torch.where(tokens < 0, drawn, tokens)
    index = logits_index.long()
    logits = model.forward(token_ids, bounds, slots, index, pool, is_decode=is_decode, out=out, normed=normed)
    if len(draws):
        sampler.draw(logits, draws)
    return logits


class StepGraphs:
    """All graphs of one model, pool and sampler, with their buffers: made at construction, which may run out of memory."""

    def __init__(self, model: RWKV7, pool: StatePool, sampler: Sampler, max_tokens: int, depth: int) -> None:
        """max_tokens: of a mixed step, at least as many as there are slots. depth: steps that may be in flight at once."""
        device, max_rows = model.device, pool.num_slots
        free, _ = torch.cuda.mem_get_info(device)
        started = time.monotonic()
        self._model, self._pool, self._sampler, self._max_rows = model, pool, sampler, max_rows
        self._memory: Any = None  # handle of the memory pool that all graphs share
        num_inputs = max_tokens + 4 * max_rows + 1
        self._staging = Staging(num_inputs, device, depth)
        self._inputs = torch.empty(num_inputs, dtype=torch.int32, device=device)
        self._bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._logits = torch.empty(max_rows, model.config.vocab_size, device=device)
        # What the last mixed step left for `RWKV7.project`, token by token; the next one overwrites it.
        self.normed = model.new_normed(max_tokens)
        self._mixed = self._capture("mixed", mixed_sizes(max_tokens), self._mixed_step, self._pad)
        self._decode = self._capture("decode", graph_sizes(max_rows), self._decode_step, lambda size: ([PADDING_SLOT] * size,))
        self.timings = self._measure()
        left, _ = torch.cuda.mem_get_info(device)
        logger.info(
            "captured and timed %d decode graphs to %d rows and %d mixed ones to %d tokens in %.1f s, %.2f GiB, %.2f GiB left",
            len(self._decode), max_rows, len(self._mixed), max_tokens, time.monotonic() - started,
            (free - left) / 2**30, left / 2**30,
        )  # fmt: skip

    def run_decode(self, slots: Sequence[int]) -> Tensor:
        """One decode step of these slots: each draws its next token, and its state is advanced.

        Returns the raw logits [R, V] float32, which the next call overwrites. Nothing waits for the device.
        """
        size, graph = _smallest(self._decode, len(slots))
        self._staging.upload((slots, [PADDING_SLOT] * (size - len(slots))), out=self._inputs)
        graph.replay()
        return self._logits[: len(slots)]

    def run_mixed(self, packed: Packed) -> Tensor:
        """One step of rows of any length. Returns the raw logits of its draws, [K, V] float32, as `run_decode` does."""
        size, graph = _smallest(self._mixed, max(len(packed.tokens), len(packed.draws)))
        self._staging.upload(self._pad(size, packed), out=self._inputs)
        graph.replay()
        return self._logits[: len(packed.draws)]

    def _measure(self) -> list[Timing]:
        """What each graph takes. A mixed one reads a single prompt, in slot 0; decoding rows are padding."""
        decode = [Timing(False, size, self._time(graph, ([PADDING_SLOT] * size,))) for size, graph in self._decode.items()]
        mixed = []
        for size, graph in self._mixed.items():
            chunk = Packed(array("i", bytes(4 * size)), (0, size), (0,), (), ())
            mixed.append(Timing(True, size, self._time(graph, self._pad(size, chunk))))
        self._pool.zero([0])
        return decode + mixed

    def _time(self, graph: torch.cuda.CUDAGraph, columns: Sequence[Sequence[int]]) -> float:
        """Seconds of a second replay; the first also brings the graph to the device."""
        self._staging.upload(columns, out=self._inputs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _pad(self, size: int, packed: Packed = NOTHING) -> Packed:
        return packed.padded(size, min(size, self._max_rows))

    def _capture(
        self, kind: str, sizes: Sequence[int], step: Callable[[int], None], padding: Callable[[int], Sequence[Sequence[int]]]
    ) -> dict[int, torch.cuda.CUDAGraph]:
        """Graphs by ascending size. The largest comes first, so that the smaller ones find room in its memory. All rows are
        padding meanwhile."""
        graphs = {}
        for number, size in enumerate(reversed(sizes), start=1):
            logger.info("capturing %s graph %d of %d (%d)", kind, number, len(sizes), size)
            self._staging.upload(padding(size), out=self._inputs)
            for _ in range(_WARM_UPS):
                step(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                step(size)
            self._memory = self._memory or graph.pool()
            graphs[size] = graph
        return dict(reversed(graphs.items()))

    def _decode_step(self, size: int) -> None:
        slots = self._inputs[:size]
        token_ids = self._sampler.last_token.index_select(0, slots.clamp(min=0))
        rows, bounds, logits = self._rows[:size], self._bounds[: size + 1], self._logits[:size]
        self._model.forward(token_ids, bounds, slots, rows, self._pool, is_decode=True, out=logits)
        self._sampler.draw(logits, slots)

    def _mixed_step(self, size: int) -> None:
        rows = min(size, self._max_rows)
        columns = self._inputs[: size + 4 * rows + 1].split([size, rows + 1, rows, rows, rows])
        mixed_step(self._model, self._pool, self._sampler, columns, False, self._logits[:rows], self.normed[:size])


def _smallest(graphs: dict[int, torch.cuda.CUDAGraph], number: int) -> tuple[int, torch.cuda.CUDAGraph]:
    size = padded_size(list(graphs), number)
    return size, graphs[size]
