"""Scores prompt tokens: how likely the model held each one, and which it held likeliest in its place.

Hidden states go through the head in blocks of a fixed number of rows, so that the logits of a whole prompt never exist at once.
Knows rows of a step, nothing of requests and queues; `model_runner` has one.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from albatross.engine.messages import ScoreColumns
from albatross.engine.sampler import PendingSamples, Samples
from albatross.engine.scheduler import Step
from albatross.engine.staging import download, pinned
from albatross.models.rwkv7 import RWKV7

BLOCK_ROWS = 128  # rows of logits at a time: 32 MiB with 65,536 ids, which an L2 cache of today holds
_LOGPROB, _RANK, _IS_BAD, _TOP = range(4)  # columns of a table of scores; behind N ids from _TOP on stand N logprobs


class Part(NamedTuple):
    """The scored tokens of one chunk: its place in the step, their first row, what they are scored against, and N."""

    place: int
    first_row: int
    targets: "array[int]"
    num_top: int


@dataclass(slots=True)
class PendingScores:
    """Scores on their way to the host: [R, 3 + 2 N] int32, which for logprobs are the bits of a float32."""

    parts: Sequence[Part]
    table: Tensor

    def read(self) -> tuple[dict[int, ScoreColumns], list[int]]:
        """The scores of each chunk by its place, and the places of those whose logits were not finite. Waits for nothing."""
        scores: dict[int, ScoreColumns] = {}
        bad_chunks: list[int] = []
        table = self.table.numpy()
        most = (table.shape[1] - _TOP) // 2
        start = 0
        for part in self.parts:
            rows = table[start : start + len(part.targets)]
            start += len(rows)
            if rows[:, _IS_BAD].any():
                bad_chunks.append(part.place)
                continue
            ids, logprobs = rows[:, _TOP : _TOP + most], rows[:, _TOP + most :]
            columns = (rows[:, _LOGPROB], rows[:, _RANK], ids[:, : part.num_top], logprobs[:, : part.num_top])
            scores[part.place] = ScoreColumns(*(column.tobytes() for column in columns))
        return scores, bad_chunks


@dataclass(slots=True)
class PendingScored:
    """A step with scored chunks. Its scores were launched before its draws were sent, so that these come last."""

    samples: PendingSamples
    scores: PendingScores

    def wait(self) -> Samples:
        samples = self.samples.wait()
        samples.scores, samples.bad_chunks = self.scores.read()
        return samples


class Scorer:
    """`launch` enqueues its work on the current stream and returns; nothing waits for a CUDA device."""

    def __init__(self, model: RWKV7) -> None:
        self._model = model
        self._vocab_size = model.config.vocab_size
        self._logits = torch.empty(BLOCK_ROWS, self._vocab_size, device=model.device)

    def launch(self, step: Step, normed: Tensor) -> PendingScores:
        """Scores the chunks of a step that was run, those that have targets; there is at least one.

        normed: [T, C], what the forward pass left for `RWKV7.project`, of all the step's tokens in their order.
        """
        parts = self._parts(step)
        most = max(part.num_top for part in parts)
        rows = np.concatenate([np.arange(part.first_row, part.first_row + len(part.targets)) for part in parts])
        targets = np.concatenate([np.frombuffer(part.targets, np.uint32) for part in parts])
        index = self._upload(np.stack((rows, targets)).astype(np.int64))
        table = torch.empty(len(rows), _TOP + 2 * most, dtype=torch.int32, device=self._model.device)
        for block, block_rows, block_targets in zip(
            table.split(BLOCK_ROWS), index[0].split(BLOCK_ROWS), index[1].split(BLOCK_ROWS), strict=True
        ):
            logits = self._logits[: len(block)]
            self._model.project(normed.index_select(0, block_rows), logits)
            _score(logits, block_targets, block)
        return PendingScores(parts, download(table))

    def _parts(self, step: Step) -> list[Part]:
        parts = []
        row = step.num_decoding
        for place, chunk in enumerate(step.chunks):
            if chunk.targets:
                num_top = min(chunk.request.params.prompt_logprobs or 0, self._vocab_size)
                parts.append(Part(place, row, chunk.targets, num_top))
            row += len(chunk.tokens)
        return parts

    def _upload(self, values: npt.NDArray[np.int64]) -> Tensor:
        return pinned(values, self._model.device).to(self._model.device, non_blocking=True)


def _score(logits: Tensor, targets: Tensor, table: Tensor) -> None:
    """Fills the rows of a table from logits [R, V] float32, which are overwritten, and the tokens [R] that came."""
    logprobs = table.view(torch.float32)
    most = (table.shape[1] - _TOP) // 2
    lowest, highest = logits.aminmax(dim=-1, keepdim=True)
    chosen = logits.gather(1, targets.unsqueeze(1))
    top = logits.topk(most, dim=-1) if most else None
    table[:, _RANK] = (logits > chosen).sum(dim=-1) + 1
    table[:, _IS_BAD] = ~(lowest.isfinite() & highest.isfinite()).squeeze(1)
    log_sum = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True).log_()
    logprobs[:, _LOGPROB] = (chosen - highest - log_sum).squeeze(1)
    if top is not None:
        table[:, _TOP : _TOP + most] = top.indices
        logprobs[:, _TOP + most :] = top.values - highest - log_sum
