"""Feeds chosen tokens to a model one a step, as decoding does, but without drawing: for measurements of what a model computes.

Knows nothing of text. `bench.drift` is the user.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from albatross.models.rwkv7 import RWKV7

CHUNK = 1024  # tokens of each row that are put on the device at once


class Stepper:
    """Feeds rows of tokens to a model one token a step; on CUDA as replays of one graph."""

    def __init__(self, model: RWKV7, num_rows: int, num_slots: int) -> None:
        self._model, self._num_rows = model, num_rows
        self.pool = model.new_state_pool(num_slots)
        device = model.device
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._ids = torch.zeros(CHUNK, num_rows, dtype=torch.long, device=device)
        self._slots = torch.full((CHUNK, num_rows), -1, dtype=torch.int32, device=device)
        self._logits = torch.empty(num_rows, model.config.vocab_size, device=device)
        self._bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self._step: Callable[[], object] = self._advance
        if device.type == "cuda":
            self._advance()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._advance()
            self._step = graph.replay

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> Iterator[Tensor]:
        """Yields after each token the logits [R, V], valid until the next. Row i continues the state in slots[i]; a row
        that is at its end rests, and its logits mean nothing."""
        length = max(map(len, rows))
        for start in range(0, length, CHUNK):
            num = min(CHUNK, length - start)
            tokens = [[*row[start : start + num], *[0] * (start + num - max(len(row), start))][:num] for row in rows]
            places = [[slot] * min(num, max(len(row) - start, 0)) for row, slot in zip(rows, slots, strict=True)]
            places = [[*row, *[-1] * (num - len(row))] for row in places]
            self._ids[:num].copy_(torch.tensor(tokens).t())
            self._slots[:num].copy_(torch.tensor(places, dtype=torch.int32).t())
            self._position.zero_()
            for _ in range(num):
                self._step()
                yield self._logits

    @torch.inference_mode()
    def _advance(self) -> None:
        ids, slots = (table.index_select(0, self._position)[0] for table in (self._ids, self._slots))
        self._logits.copy_(self._model.forward(ids, self._bounds, slots, self._rows, self.pool, is_decode=True))
        self._position.add_(1)
