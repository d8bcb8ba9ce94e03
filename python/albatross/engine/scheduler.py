"""Which rows the next step runs, and what the drawn tokens mean for them. Imports no torch and knows no text.

Each step every running stream decodes one token; prompts then take what is left of the token budget, in order of
arrival within a priority, long ones in chunks. A prompt takes at most half of what is left while another could use
the rest, so a long prompt delays short ones behind it by a bounded number of steps and never stops the running ones.
"""

import heapq
from array import array
from dataclasses import dataclass, field
from itertools import count

from albatross.engine.messages import EngineStats, Finish
from albatross.engine.request import Request, Stream

MIN_CHUNK = 16  # smallest share of a prompt, so that the halving rule cannot cut prompts into crumbs


@dataclass(slots=True)
class Row:
    """One slot's tokens in one step. `samples` are the streams that draw from the logits after its last token."""

    slot: int
    tokens: "array[int]"
    request: Request
    samples: list[Stream]
    is_prompt: bool


@dataclass(slots=True)
class Step:
    """The rows of one step; `admitted` are the requests whose slots were handed out for it and must be zeroed."""

    rows: list[Row] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def is_decode(self) -> bool:
        return all(len(row.tokens) == 1 for row in self.rows)


@dataclass(slots=True)
class Drawn:
    """What the sampler drew for all `samples` of a step, in order. `is_bad` marks rows whose logits were not finite."""

    token_ids: list[int]
    is_bad: list[bool]


class Scheduler:
    """Queues, slots and the token budget. One `schedule`, one `settle` a step; `add` and `abort` at any time between."""

    def __init__(self, num_slots: int, token_budget: int) -> None:
        self.num_slots = num_slots
        self.token_budget = token_budget
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: list[tuple[int, int, Request]] = []
        self._order = count()
        self._prefilling: list[Request] = []
        self._decoding: dict[Stream, Request] = {}
        self._streams: dict[int, tuple[Stream, Request]] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def add(self, request: Request) -> None:
        for stream in request.streams:
            self._streams[stream.stream_id] = stream, request
        self._num_waiting += len(request.streams)
        self._num_waiting_tokens += len(request.prompt)
        heapq.heappush(self._waiting, (request.priority, next(self._order), request))

    def abort(self, stream_ids: tuple[int, ...]) -> None:
        """Ends these streams without a word; unknown and finished ids are passed over."""
        for stream_id in stream_ids:
            stream, request = self._streams.get(stream_id, (None, None))
            if stream is not None and request is not None:
                self._end(stream, request)

    @property
    def has_work(self) -> bool:
        return bool(self._streams)

    def schedule(self) -> Step:
        step = Step()
        for stream, request in self._decoding.items():
            step.rows.append(Row(stream.slot, array("I", (stream.last_token,)), request, [stream], is_prompt=False))
        self._schedule_prompts(step, self.token_budget - len(step.rows))
        return step

    def settle(self, step: Step, drawn: Drawn) -> list[Finish]:
        """Takes what a step drew, moves its streams on, and returns those that ended."""
        self.num_steps += 1
        finished: list[Finish] = []
        results = iter(zip(drawn.token_ids, drawn.is_bad, strict=True))
        for row in step.rows:
            if row.is_prompt:
                self._advance_prompt(row, finished)
            for stream in row.samples:
                token_id, is_bad = next(results)
                self._take_token(stream, row.request, token_id, is_bad, finished)
        return finished

    def stats(self, step_ms: float = 0.0) -> EngineStats:
        return EngineStats(
            num_running=self.num_slots - len(self._free),
            num_waiting=self._num_waiting,
            num_waiting_tokens=self._num_waiting_tokens,
            num_steps=self.num_steps,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self.num_generated_tokens,
            step_ms=step_ms,
        )

    def _schedule_prompts(self, step: Step, budget: int) -> None:
        queue = list(self._prefilling)
        while budget > 0:
            request = queue.pop(0) if queue else self._admit(step)
            if request is None:
                return
            share = max(budget // 2, MIN_CHUNK) if queue or self._can_admit() else budget
            length = min(request.num_unread, share, budget)
            start = request.num_prefilled
            is_last = length == request.num_unread
            samples = request.living if is_last and request.limit > 0 else []
            slot = request.streams[0].slot
            step.rows.append(Row(slot, request.prompt[start : start + length], request, samples, is_prompt=True))
            budget -= length

    def _can_admit(self) -> bool:
        while self._waiting and not self._waiting[0][2].living:
            heapq.heappop(self._waiting)
        return bool(self._waiting) and len(self._waiting[0][2].streams) <= len(self._free)

    def _admit(self, step: Step) -> Request | None:
        if not self._can_admit():
            return None
        request = heapq.heappop(self._waiting)[2]
        self._num_waiting -= len(request.living)
        self._num_waiting_tokens -= len(request.prompt)
        for stream in request.streams:
            stream.slot = self._free.pop()
        self._prefilling.append(request)
        step.admitted.append(request)
        return request

    def _advance_prompt(self, row: Row, finished: list[Finish]) -> None:
        request = row.request
        request.num_prefilled += len(row.tokens)
        self.num_prompt_tokens += len(row.tokens)
        if request.num_unread:
            return
        self._prefilling.remove(request)
        for stream in request.streams:
            if stream.is_finished:  # aborted while the prompt was read; its slot waited for that
                self._release(stream)
            elif request.limit == 0:
                self._finish(stream, request, Finish(stream.stream_id, "length"), finished)
            else:
                self._decoding[stream] = request

    def _take_token(self, stream: Stream, request: Request, token_id: int, is_bad: bool, finished: list[Finish]) -> None:
        if is_bad:
            error = "The model gave a number that is not finite for this request; other requests are not affected."
            self._finish(stream, request, Finish(stream.stream_id, "error", error=error), finished)
            return
        stream.last_token = token_id
        stream.num_generated += 1
        self.num_generated_tokens += 1
        if token_id in request.stop_ids and stream.num_generated > request.params.min_tokens:
            self._finish(stream, request, Finish(stream.stream_id, "stop", stop_token_id=token_id), finished)
        elif stream.num_generated >= request.limit:
            self._finish(stream, request, Finish(stream.stream_id, "length"), finished)

    def _finish(self, stream: Stream, request: Request, finish: Finish, finished: list[Finish]) -> None:
        finished.append(finish)
        self._end(stream, request)

    def _end(self, stream: Stream, request: Request) -> None:
        stream.is_finished = True
        del self._streams[stream.stream_id]
        if stream.slot < 0:  # still waiting; the queue drops the request when it comes to its head
            self._num_waiting -= 1
            self._num_waiting_tokens -= 0 if request.living else len(request.prompt)
        elif self._decoding.pop(stream, None) is not None or request.num_unread == 0:
            self._release(stream)
        elif not request.living:
            self._prefilling.remove(request)
            for each in request.streams:
                self._release(each)

    def _release(self, stream: Stream) -> None:
        self._free.append(stream.slot)
        stream.slot = -1
