"""Draws one id a row, each row by its request's parameters, and brings what was drawn to the host a step later.

Everything a draw needs stands on the device in tables by slot, the last id and its position too: `draw` takes logits and slots
alone and can be part of a graph. The law is in `reference/sampling.py`. Knows slots, not requests' lives; `model_runner` owns it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from albatross import ops, reference
from albatross.constants import END_OF_TEXT_ID, MAX_LOGPROBS
from albatross.engine.messages import ScoreColumns, TokenLogprobs
from albatross.engine.request import Request
from albatross.engine.staging import download, pinned
from albatross.reference.sampling import RECORD_WORDS, Field, Flag, SlotTables
from albatross.sampling_params import SamplingParams

_LEAST_TEMPERATURE = 1e-5  # keeps quotients finite; any lower temperature draws the likeliest id too
_STOP_BIT = -(2**31)


@dataclass(slots=True)
class Samples:
    """What one step drew: one id and one flag a row, and log-probabilities by row for those that asked.

    scores: of the step's chunks that were scored, by their place in it; bad_chunks: places of those whose logits were not finite.
    """

    token_ids: list[int]
    is_bad: list[bool]
    logprobs: dict[int, TokenLogprobs]
    scores: dict[int, ScoreColumns] = field(default_factory=dict)
    bad_chunks: Sequence[int] = ()


@dataclass(slots=True)
class _Logprobs:
    """Of the rows that asked, on the host once their copies are made: [R], [R, N] and [R, N]."""

    numbers: dict[int, int]  # row -> how many alternatives it asked for
    drawn: Tensor
    top: Tensor
    top_ids: Tensor


@dataclass(slots=True)
class PendingSamples:
    """Draws whose results are on their way to the host."""

    num_rows: int
    results: Tensor  # [9 S] uint8, see `_split`
    logprobs: _Logprobs | None
    arrival: torch.cuda.Event | None  # None on the CPU, where everything is there at once

    def wait(self) -> Samples:
        """The samples, once the device has drawn them. Waits for this draw, not for what was launched after it."""
        if self.arrival is not None:
            self.arrival.synchronize()
        raw = self.results.numpy()  # whose views are made in a fraction of the time of a tensor's
        flags = len(raw) - len(raw) // 9
        token_ids = raw[: 8 * self.num_rows].view(np.int64).tolist()
        is_bad = raw[flags : flags + self.num_rows].view(np.bool_).tolist()
        return Samples(token_ids, is_bad, self._read_logprobs(is_bad))

    def _read_logprobs(self, is_bad: list[bool]) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        columns = (self.logprobs.drawn.tolist(), self.logprobs.top_ids.tolist(), self.logprobs.top.tolist())
        rows = zip(self.logprobs.numbers.items(), *columns, strict=True)
        return {
            row: TokenLogprobs(logprob, tuple(ids[:number]), tuple(values[:number]))
            for (row, number), logprob, ids, values in rows
            if not is_bad[row]
        }


class Sampler:
    """All methods enqueue their work on the current stream and return; nothing waits for a CUDA device but `PendingSamples.wait`.

    A slot belongs to the request it was last assigned to. `last_token` [S] int64 is what each slot drew last.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, backend: str) -> None:
        """backend: 'native' or 'reference', who draws."""
        self.device = device
        self.vocab_size = vocab_size
        self._num_slots = num_slots
        self._sample = ops.sample if backend == "native" else reference.sample
        self._tables = SlotTables.allocate(num_slots, vocab_size, device)
        self.last_token = self._tables.last_token
        self.position = self._tables.records[:, Field.POSITION]
        self._results = torch.zeros(9 * num_slots, dtype=torch.uint8, device=device)
        self._drawn, self._is_bad = _split(self._results)
        self._params: list[SamplingParams] = [SamplingParams()] * num_slots
        if device.type == "cuda":  # graphs remember where it lies; on the CPU most engines never need it
            self._tables.counts = self._new_counts()

    def forbid(self, token_ids: Sequence[int]) -> None:
        """Ids no row ever draws."""
        words = np.zeros(len(self._tables.forbidden), np.uint32)
        ids = np.asarray(token_ids, np.int64)
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        self._upload(self._tables.forbidden, words.view(np.int32))

    def assign(self, request: Request) -> None:
        """Prepares the slots of a request's streams for its parameters; positions and counts start at zero."""
        params = request.params
        edits = _edits(params)
        prompt = np.unique(np.frombuffer(request.prompt, np.uint32), return_counts=True) if params.penalize_prompt else None
        for stream in request.streams:
            slot = stream.slot
            self._params[slot] = params
            self._upload(self._tables.records[slot], _record(params, request.seed, stream.choice, len(edits)))
            if edits:
                self._upload(self._tables.edit_ids[slot, : len(edits)], np.array([*edits], np.int64).astype(np.int32))
                self._upload(self._tables.edit_values[slot, : len(edits)], np.array([*edits.values()], np.float32))
            if params.has_penalties:
                self._reset_counts(slot, prompt)

    def draw(self, logits: Tensor, slots: Tensor, allowed: Tensor | None = None) -> None:
        """Draws one id for each slot from its row of raw logits, which are not changed. Can be captured in a graph.

        logits: [K, V] float32. slots: [K] int32 on the device, no two alike, negative: padding. allowed: [K, W] int32, bit mask
        of the ids a row may draw.
        """
        num_rows = slots.shape[0]
        self._sample(logits, slots, self._tables, self._drawn[:num_rows], self._is_bad[:num_rows], allowed=allowed)

    def collect(self, logits: Tensor, slots: Sequence[int]) -> PendingSamples:
        """Sends the results of the draw before to the host. logits: those it drew from; slots: of its rows, padding left out."""
        numbers = {row: n for row, slot in enumerate(slots) if (n := self._params[slot].logprobs) is not None}
        logprobs = self._collect_logprobs(logits, numbers) if numbers else None
        results = download(self._results)
        if self.device.type != "cuda":
            return PendingSamples(len(slots), results, logprobs, None)
        arrival = torch.cuda.Event()
        arrival.record()
        return PendingSamples(len(slots), results, logprobs, arrival)

    def _collect_logprobs(self, logits: Tensor, numbers: dict[int, int]) -> _Logprobs:
        rows = pinned(np.array([*numbers], np.int64), self.device).to(self.device, non_blocking=True)
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        drawn = logprobs.gather(1, self._drawn[rows].unsqueeze(1)).squeeze(1)
        top = logprobs.topk(min(max(numbers.values()), MAX_LOGPROBS, self.vocab_size), dim=-1)
        return _Logprobs(numbers, download(drawn), download(top.values), download(top.indices))

    def _new_counts(self) -> Tensor:
        return torch.zeros(self._num_slots, self.vocab_size, device=self.device)

    def _reset_counts(self, slot: int, prompt: tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]] | None) -> None:
        if self._tables.counts is None:
            self._tables.counts = self._new_counts()
        row = self._tables.counts[slot].zero_()
        if prompt is not None:
            ids, numbers = (pinned(column, self.device).to(self.device, non_blocking=True) for column in
                            (prompt[0].astype(np.int64), prompt[1].astype(np.float32)))  # fmt: skip
            row.index_copy_(0, ids, numbers)

    def _upload(self, target: Tensor, values: npt.NDArray[np.generic]) -> None:
        target.copy_(pinned(values, self.device), non_blocking=True)


def _record(params: SamplingParams, seed: int, choice: int, num_edits: int) -> npt.NDArray[np.int32]:
    """A slot's record at position 0."""
    words = np.zeros(RECORD_WORDS, np.uint32)
    words[: Field.TOP_K].view(np.float32)[:] = (
        max(params.temperature, _LEAST_TEMPERATURE), params.top_p, params.min_p,
        params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.penalty_decay,
    )  # fmt: skip
    flags = Flag.GREEDY if params.is_greedy else Flag(0)
    if params.sampler_order == "rwkv-classic":
        flags |= Flag.CLASSIC
    if params.has_penalties:
        flags |= Flag.PENALTIES
    if params.has_limits:
        flags |= Flag.LIMITS
    top_k, min_tokens = (min(max(number, 0), 2**31 - 1) for number in (params.top_k, params.min_tokens))
    words[Field.TOP_K :] = (top_k, seed & 0xFFFFFFFF, seed >> 32, choice, 0, min_tokens, num_edits, flags, 0)
    return words.view(np.int32)


def _edits(params: SamplingParams) -> dict[int, float]:
    """A request's entries of the edit tables, id -> value: biases, bans, and bans of what would end it before min_tokens."""
    edits = dict(params.logit_bias)
    edits.update((token_id, -np.inf) for token_id in params.banned_token_ids)
    if params.min_tokens:
        for token_id in {END_OF_TEXT_ID, *params.stop_token_ids}:
            edits[token_id + _STOP_BIT] = edits.pop(token_id, 0.0)
    return edits


def _split(results: Tensor) -> tuple[Tensor, Tensor]:
    """Of [9 S] bytes: the ids [S] int64 and the flags [S] bool, so that one copy brings both."""
    num_slots = len(results) // 9
    return results[: 8 * num_slots].view(torch.long), results[8 * num_slots :].view(torch.bool)
