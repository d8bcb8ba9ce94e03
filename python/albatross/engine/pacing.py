"""How long steps take, and what the next one may hold so that running streams keep their pace. Knows no torch and no requests.

`core` tells it what each step took. `scheduler` asks it before each step how many tokens of prompts to read, and how many of the
decoding rows to leave out. The time of a step grows with its size in stairs, since matrix products are computed in tiles: what
fills a tile is nearly free, and the first row beyond it is dear.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from albatross.engine.sizes import graph_sizes, mixed_sizes, padded_size

MIN_CHUNK = 16  # prompt tokens of a step, however long they take: a prompt always moves on
RESTING_SHARE = 8  # at most one decoding row in so many sits a step out
MEASURE_EVERY = 16  # steps with prompts in a row, after which one without shows what the decoding rows take by themselves
_NUM_KEPT = 5  # measurements of a size
_NUM_TRUSTED = 2  # measurements that stand against what those of other sizes say,
_FRESH_STEPS = 64  # for so many steps
_NEARLY_BEST = 0.95  # rates that differ by less are equal: measurements are not better than that


class Timing(NamedTuple):
    """What one step took."""

    is_mixed: bool  # whether it held prompts
    size: int  # rows or tokens, padded
    seconds: float


@dataclass(slots=True)
class _Record:
    """What is known of one size: the last measurements, and what was expected before them."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    expected: float | None = None
    seen_at: int = 0  # number of the last step of this size
    seconds: float = 0.0  # what it is taken to need

    @property
    def is_trusted(self) -> bool:
        return len(self.samples) >= _NUM_TRUSTED

    def update(self) -> None:
        """A low quantile: two quick steps of five bring it down, four slow ones up, so that hiccups do not count."""
        known = list(self.samples) if self.is_trusted or self.expected is None else [*self.samples, self.expected]
        self.seconds = sorted(known)[(len(known) - 1) // 3]


class StepTimes:
    """Seconds of a step by kind and padded size, from what steps took. What was not measured lately is held against what was."""

    def __init__(self, decode_sizes: Sequence[int], mixed_sizes: Sequence[int]) -> None:
        self._mixed_sizes = mixed_sizes
        self._decode_sizes = decode_sizes
        self._decode: dict[int, _Record] = {}
        self._mixed: dict[int, _Record] = {}
        self._num_observed = 0

    def expect(self, timings: Iterable[Timing]) -> None:
        """First values, which measured steps correct."""
        for timing in timings:
            record = self._record(timing.is_mixed, timing.size)
            record.expected = timing.seconds
            record.update()

    def observe(self, is_mixed: bool, width: int, seconds: float) -> None:
        """A step of `width` rows or tokens took so long."""
        self._num_observed += 1
        record = self._record(is_mixed, width)
        if record.samples and not self._is_fresh(record):
            record.expected = record.seconds
            record.samples.clear()
        record.samples.append(seconds)
        record.seen_at = self._num_observed
        record.update()

    def knows(self, num_rows: int) -> bool:
        """Whether there is a value for a decode step of about so many rows."""
        size = padded_size(self._decode_sizes, num_rows)
        return any(num_rows <= 2 * each <= 2 * size for each in self._decode)

    def decode(self, num_rows: int) -> float:
        """A step of so many decoding rows and nothing else. 0 before anything was measured."""
        size = padded_size(self._decode_sizes, num_rows)
        return _interpolate(sorted((each, record.seconds) for each, record in self._decode.items()), size)

    def mixed(self, least_size: int) -> Iterator[tuple[int, float]]:
        """Each of the mixed sizes from one on, ascending, and what a step with prompts of that size takes.

        What was measured lately, and more than once, stands. Any other value is kept within what those of other sizes allow: time
        grows with the size, but no faster than it. So a size that a hiccup made slow is tried again, one that is beyond all
        that was measured is thought rather too slow than too quick, and sizes still grow fast.
        """
        trusted = {size: record for size, record in self._mixed.items() if record.is_trusted}
        fresh = [{size: each.seconds for size, each in kind.items() if self._is_fresh(each)} for kind in (self._decode, trusted)]
        points = sorted((fresh[0] | fresh[1]).items())
        for size in self._mixed_sizes[bisect_left(self._mixed_sizes, least_size) :]:
            record = self._mixed.get(size)
            if record is not None and (not points or (record.is_trusted and self._is_fresh(record))):
                yield size, record.seconds
            else:
                most = _interpolate(points, size) * max(size / points[-1][0], 1.0) if points else 0.0
                least = max((each.seconds * size / larger for larger, each in trusted.items() if larger > size), default=0.0)
                yield size, min(most, max(least, record.seconds if record is not None else most))

    def _record(self, is_mixed: bool, width: int) -> _Record:
        size = padded_size(self._mixed_sizes if is_mixed else self._decode_sizes, width)
        return (self._mixed if is_mixed else self._decode).setdefault(size, _Record())

    def _is_fresh(self, record: _Record) -> bool:
        return bool(record.samples) and self._num_observed - record.seen_at <= _FRESH_STEPS


def _interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """Straight between two neighbours among sizes, ascending, with their seconds; never falling, level beyond the ends."""
    if not points:
        return 0.0
    place = bisect_left(points, (size,))
    if place == len(points):
        return points[-1][1]
    if place == 0 or points[place][0] == size:
        return points[place][1]
    (low, low_s), (high, high_s) = points[place - 1], points[place]
    return low_s + max(high_s - low_s, 0.0) * (size - low) / (high - low)


class Share(NamedTuple):
    """What a step holds besides the decoding rows, and how many of those it leaves out."""

    num_tokens: int
    num_resting: int = 0
    size: int = 0
    seconds: float = 0.0


class Pacer:
    """One `choose` a step. A step with prompts takes at most `pace` times as long as one of the decoding rows alone, as far as
    times are known and at least the smallest piece of a prompt is read. pace 0: whatever the budget holds."""

    def __init__(self, num_slots: int, token_budget: int, pace: float) -> None:
        self.times = StepTimes(graph_sizes(num_slots), mixed_sizes(token_budget))
        self.budget = token_budget
        self._pace = pace
        self._num_mixed = 0  # steps with prompts since the last one without
        self._waited_s = 0.0  # by rows that sat the last step out

    def choose(self, num_decoding: int, num_wanted: int, max_resting: int) -> Share:
        """num_wanted: prompt tokens that could be read. max_resting: decoding rows that may sit this step out."""
        waited_s, self._waited_s = self._waited_s, 0.0
        if not num_wanted:
            self._num_mixed = 0
            return Share(0)
        if not num_decoding or not self._pace:
            return Share(min(num_wanted, self.budget - num_decoding))
        self._num_mixed += 1
        if self._num_mixed > MEASURE_EVERY or not self.times.knows(num_decoding):
            self._num_mixed = 0
            return Share(0)
        limit_s = self._pace * self.times.decode(num_decoding) - waited_s
        share = self._best(self._shares(num_decoding, num_wanted, max_resting), num_decoding, limit_s)
        self._waited_s = share.seconds if share.num_resting else 0.0
        return share

    def _shares(self, num_decoding: int, num_wanted: int, max_resting: int) -> list[Share]:
        """One for each size that holds the decoding rows and a piece of a prompt, up to the first that holds all."""
        least = min(num_wanted, MIN_CHUNK, self.budget - num_decoding)
        shares = []
        for size, seconds in self.times.mixed(num_decoding + least - max_resting):
            room = size - num_decoding
            num_tokens = min(num_wanted, room if room >= least else room + max_resting)
            share = Share(num_tokens, max(num_tokens - room, 0), size, seconds)
            shares.append(share)
            if num_tokens == num_wanted and not share.num_resting:
                break
        return shares

    @staticmethod
    def _best(shares: Sequence[Share], num_decoding: int, limit_s: float) -> Share:
        """The most tokens a second within the limit; of nearly equal ones the most prompt tokens and the fewest rows at rest.

        Rows rest only in a step that takes half of the limit, since they wait for the next one as well.
        """
        within = [each for each in shares if each.seconds <= (limit_s / 2 if each.num_resting else limit_s)]
        if not within:
            return min(shares, key=lambda each: (each.num_resting > 0, each.seconds, each.size))
        rates = [(num_decoding - each.num_resting + each.num_tokens) / max(each.seconds, 1e-9) for each in within]
        nearly_best = _NEARLY_BEST * max(rates)
        good = [each for each, rate in zip(within, rates, strict=True) if rate >= nearly_best]
        return max(good, key=lambda each: (each.num_tokens, -each.num_resting, -each.size))
