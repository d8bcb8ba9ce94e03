"""Which rows the next step runs, and what the drawn tokens mean for them. Imports no torch and knows no text.

Each step every running stream decodes one token, and prompts are read, in chunks, as many tokens as `pacing` allows. A quarter
of them go to the request that came first, so that a long prompt moves on whatever comes; the rest to those that have least
left to read, within a priority, so that a long prompt does not hold up short ones. Where a rest of a prompt would cost a step
much more than its tokens are worth, some streams sit that step out, in turns: they draw the same tokens, one step later.

A step may be scheduled while earlier ones still run. So whatever is certain happens in `schedule`: chunks count as read,
and a stream leaves with the step that draws its last allowed token. What only the tokens tell happens in `settle`: a
stream that stopped has by then rows in later steps, whose draws are discarded. Slots are handed out again while steps that
use them are in flight, because the device runs steps in order and zeroes a slot in the step it is handed out for.
"""

import heapq
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, takewhile

from albatross.engine.messages import EngineStats, Finish
from albatross.engine.pacing import MIN_CHUNK, RESTING_SHARE, Pacer
from albatross.engine.request import Request, Stream

OLDEST_SHARE = 4  # one prompt token in so many is for the request that came first
REST_STEPS = 5  # a stream sits out at most one step in so many
_NOT_FINITE = "The model gave a number that is not finite for this request; other requests are not affected."


@dataclass(slots=True)
class Chunk:
    """A piece of a prompt, read in one slot. After the last one `samples` draw, each with a copy of the state in its slot.

    targets: what the first of its tokens are scored against, see `Request.targets`.
    """

    request: Request
    slot: int
    tokens: "array[int]"
    samples: list[Stream]
    is_last: bool
    targets: "array[int]" = field(default_factory=lambda: array("I"))


@dataclass(slots=True)
class Step:
    """One row for each of the first `num_decoding` of `draws`, which run the token they drew last, then one for each chunk.

    draws: the streams that draw a token, in order: those that decode, then those of the chunks. admitted: the requests whose
    slots were handed out for this step and must be zeroed before it. Slots are to be read before the next `settle`.
    """

    draws: list[tuple[Stream, Request]] = field(default_factory=list)
    num_decoding: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.draws and not self.chunks

    @property
    def num_tokens(self) -> int:
        return self.num_decoding + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def width(self) -> int:
        """Its size before padding: tokens, or draws where a prompt of few tokens has many choices."""
        return max(self.num_tokens, len(self.draws))


@dataclass(slots=True)
class Settled:
    """What a step gave: columns of streams and tokens, the place of each among the step's draws, and the streams that ended.

    scored: places of chunks whose scores are wanted, each with the streams of its prompt that had not ended.
    """

    stream_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    scored: dict[int, tuple[int, ...]] = field(default_factory=dict)


_Waiting = tuple[int, int, Request]  # priority, arrival


class Scheduler:
    """Queues and slots. One `schedule`, later one `settle` a step; `add` and `abort` at any time between."""

    def __init__(self, num_slots: int, pacer: Pacer) -> None:
        self.num_slots = num_slots
        self._pacer = pacer
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: list[_Waiting] = []
        self._order = count()
        self._prefilling: list[Request] = []
        self._decoding: dict[Stream, Request] = {}
        self._leaving: list[Stream] = []  # have no row after the step scheduled last
        self._streams: dict[int, tuple[Stream, Request]] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_scheduled = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_discarded_tokens = 0  # draws of streams that had ended by the time they were seen

    def add(self, request: Request) -> None:
        for stream in request.streams:
            self._streams[stream.stream_id] = stream, request
        self._num_waiting += len(request.streams)
        self._num_waiting_tokens += len(request.prompt)
        request.arrival = next(self._order)
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))

    def abort(self, stream_ids: tuple[int, ...]) -> None:
        """Ends these streams without a word; unknown and finished ids are passed over."""
        for stream_id in stream_ids:
            stream, request = self._streams.get(stream_id, (None, None))
            if stream is not None and request is not None:
                self._end(stream, request)

    @property
    def has_work(self) -> bool:
        """Whether a stream has not ended. Steps that are in flight for ended ones are the caller's to know."""
        return bool(self._streams)

    def schedule(self) -> Step:
        for stream in self._leaving:
            self._release(stream)
        self._leaving.clear()
        self._num_scheduled += 1
        candidates = self._candidates()
        queue = self._prefilling + [request for _, _, request in candidates]
        num_wanted = sum(request.num_unread for request in queue)
        share = self._pacer.choose(len(self._decoding), num_wanted, self._max_resting() if queue else 0)
        step = Step()
        self._decode(step, share.num_resting)
        for request, length in _divide(queue, share.num_tokens):
            if not request.is_admitted:
                self._admit(request, step)
            self._read(request, length, step)
        for entry in candidates:
            if not entry[2].is_admitted:
                heapq.heappush(self._waiting, entry)
        return step

    def settle(
        self, step: Step, token_ids: Sequence[int], is_bad: Sequence[bool], bad_chunks: Collection[int] = ()
    ) -> Settled:
        """Takes what each of the step's draws gave, and whether its logits were not finite. Steps settle in order.

        bad_chunks: places of the chunks that were scored with logits that were not finite.
        """
        self.num_steps += 1
        settled = Settled()
        for place, chunk in enumerate(step.chunks):
            self.num_prompt_tokens += len(chunk.tokens)
            if chunk.targets:
                self._settle_scores(place, chunk.request, place in bad_chunks, settled)
            if chunk.is_last:
                self._end_reading(chunk.request, settled)
        for place, (stream, request) in enumerate(step.draws):
            if stream.is_finished:
                self.num_discarded_tokens += 1
            elif is_bad[place]:
                self._finish(stream, request, Finish(stream.stream_id, "error", error=_NOT_FINITE), settled)
            else:
                settled.places.append(place)
                self._take_token(stream, request, token_ids[place], settled)
        return settled

    def stats(self, step_ms: float = 0.0) -> EngineStats:
        return EngineStats(
            num_running=self.num_slots - len(self._free),
            num_waiting=self._num_waiting,
            num_waiting_tokens=self._num_waiting_tokens,
            num_steps=self.num_steps,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self.num_generated_tokens,
            discarded_tokens=self.num_discarded_tokens,
            step_ms=step_ms,
        )

    def _max_resting(self) -> int:
        """How many streams may sit the next step out: a share of all, none of which did lately."""
        latest = self._num_scheduled - REST_STEPS
        first = islice(self._decoding, len(self._decoding) // RESTING_SHARE)
        return sum(1 for _ in takewhile(lambda stream: stream.rested_at <= latest, first))

    def _decode(self, step: Step, num_resting: int) -> None:
        """Gives the step its decoding rows. Those that sit it out become the last in turn to do so again."""
        for stream in list(islice(self._decoding, num_resting)):
            stream.rested_at = self._num_scheduled
            self._decoding[stream] = self._decoding.pop(stream)
        step.num_decoding = len(self._decoding) - num_resting
        step.draws = list(islice(self._decoding.items(), step.num_decoding))
        for stream, request in step.draws:
            stream.num_scheduled += 1
            if stream.num_scheduled >= request.limit:
                del self._decoding[stream]
                self._leaving.append(stream)

    def _candidates(self) -> list[_Waiting]:
        """Takes from the queue, in order, the requests that slots are free for, as many as could get a piece of the next step."""
        num_free, num_tokens, found = len(self._free), self._pacer.budget, []
        while num_tokens > 0 and self._waiting:
            request = self._waiting[0][2]
            if request.living and len(request.streams) > num_free:
                break
            entry = heapq.heappop(self._waiting)
            if request.living:
                found.append(entry)
                num_free -= len(request.streams)
                num_tokens -= min(len(request.prompt), MIN_CHUNK)
        return found

    def _read(self, request: Request, length: int, step: Step) -> None:
        """Gives the next `length` tokens of a prompt to the step, and with the last of them its streams' first draws."""
        start = request.num_prefilled
        request.num_prefilled += length
        is_last = request.num_unread == 0
        samples = request.living if is_last and request.limit > 0 else []
        tokens = request.prompt[start : start + length]
        step.chunks.append(
            Chunk(request, request.streams[0].slot, tokens, samples, is_last, request.targets(start, length))
        )
        if not is_last:
            return
        self._prefilling.remove(request)
        for stream in samples:
            stream.num_scheduled = 1
            step.draws.append((stream, request))
            if request.limit > 1:
                self._decoding[stream] = request
        self._leaving += [stream for stream in request.streams if stream not in self._decoding]

    def _admit(self, request: Request, step: Step) -> None:
        request.is_admitted = True
        self._num_waiting -= len(request.living)
        self._num_waiting_tokens -= len(request.prompt)
        for stream in request.streams:
            stream.slot = self._free.pop()
        self._prefilling.append(request)
        step.admitted.append(request)

    def _settle_scores(self, place: int, request: Request, is_bad: bool, settled: Settled) -> None:
        if is_bad:
            for stream in request.living:
                self._finish(stream, request, Finish(stream.stream_id, "error", error=_NOT_FINITE), settled)
        elif request.living:
            settled.scored[place] = tuple(stream.stream_id for stream in request.living)

    def _end_reading(self, request: Request, settled: Settled) -> None:
        """Ends a request that wants no tokens; gives back slots of streams that were aborted while the prompt was read."""
        for stream in request.streams:
            if stream.is_finished:
                self._release(stream)
            elif request.limit == 0:
                self._finish(stream, request, Finish(stream.stream_id, "length"), settled)

    def _take_token(self, stream: Stream, request: Request, token_id: int, settled: Settled) -> None:
        settled.stream_ids.append(stream.stream_id)
        settled.token_ids.append(token_id)
        stream.num_generated += 1
        self.num_generated_tokens += 1
        if token_id in request.stop_ids and stream.num_generated > request.params.min_tokens:
            self._finish(stream, request, Finish(stream.stream_id, "stop", stop_token_id=token_id), settled)
        elif stream.num_generated >= request.limit:
            self._finish(stream, request, Finish(stream.stream_id, "length"), settled)

    def _finish(self, stream: Stream, request: Request, finish: Finish, settled: Settled) -> None:
        settled.finished.append(finish)
        self._end(stream, request)

    def _end(self, stream: Stream, request: Request) -> None:
        stream.is_finished = True
        del self._streams[stream.stream_id]
        if not request.is_admitted:  # the queue drops the request when it comes to its head
            self._num_waiting -= 1
            self._num_waiting_tokens -= 0 if request.living else len(request.prompt)
        elif request.num_unread == 0:
            self._decoding.pop(stream, None)
            self._release(stream)
        elif not request.living:
            self._prefilling.remove(request)
            for each in request.streams:
                self._release(each)

    def _release(self, stream: Stream) -> None:
        """Gives a slot back, once; a stream that still reads its prompt keeps it until the last chunk is scheduled."""
        if stream.slot >= 0:
            self._free.append(stream.slot)
            stream.slot = -1


def _divide(queue: Sequence[Request], num_tokens: int) -> list[tuple[Request, int]]:
    """Who reads how many of a step's prompt tokens: those that read any."""
    if not queue or not num_tokens:
        return []
    oldest = min(queue, key=lambda request: request.arrival)
    lengths = {oldest: min(oldest.num_unread, max(num_tokens // OLDEST_SHARE, 1))}
    left = num_tokens - lengths[oldest]
    for request in sorted(queue, key=lambda request: (request.priority, request.num_unread, request.arrival)):
        own = lengths.get(request, 0)
        length = min(request.num_unread - own, left)
        if length:
            lengths[request] = own + length
            left -= length
    return list(lengths.items())
