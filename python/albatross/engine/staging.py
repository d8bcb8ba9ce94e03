"""Host buffers for what a step tells the device, and what comes back: copied by the device while the host goes on.

Knows nothing of what the numbers mean. `model_runner` and `graphs` each have a ring for their steps; `sampler` and `scoring` take
other memory for each copy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Staging:
    """A ring of `depth` buffers of `size` int32 numbers, pinned on CUDA; one is written again when its copy has been made."""

    def __init__(self, size: int, device: torch.device, depth: int) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(depth)]
        self._arrays: list[npt.NDArray[np.int32]] = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(depth)] if is_cuda else []
        self._turn = 0

    def upload(self, columns: Sequence[Sequence[int]], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Copies of the columns on the device, int32, in the current stream's order; nothing waits for the device.

        out: where they go, one behind the other; without it, into memory of their own.
        """
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        if self._copied:
            self._copied[turn].synchronize()
        lengths = [len(column) for column in columns]
        start = 0
        for column, length in zip(columns, lengths, strict=True):
            self._arrays[turn][start : start + length] = column
            start += length
        target = torch.empty(start, dtype=torch.int32, device=self._device) if out is None else out[:start]
        target.copy_(self._buffers[turn][:start], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        return tuple(target.split(lengths))


def pinned(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host tensor that a device may copy from while the host goes on; torch keeps its memory until the copy is made."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def download(x: Tensor) -> Tensor:
    """A copy of `x` on the host, valid once the work now on the stream is done."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) if x.is_cuda else x.clone()
