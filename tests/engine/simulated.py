"""A device without a model: each step takes the time that a cost function gives, on a clock that stands still otherwise.

It works as CUDA does: `launch` puts a step behind those before it, `wait` moves the clock to the step's end. Every draw is id 1.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from scripted import Clock

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AddRequest, EngineReady, pack_ids, unpack_ids
from albatross.engine.pacing import Timing
from albatross.engine.sampler import Samples
from albatross.engine.scheduler import Step
from albatross.engine.sizes import graph_sizes, mixed_sizes, padded_size
from albatross.sampling_params import SamplingParams

Cost = Callable[[int, int], float]  # seconds, by padded size and rows


@dataclass
class SimulatedPending:
    clock: Clock
    done_at: float
    num_draws: int

    def wait(self) -> Samples:
        self.clock.now = max(self.clock.now, self.done_at)
        return Samples([1] * self.num_draws, [False] * self.num_draws, {})


class SimulatedRunner:
    """Keeps the steps it ran. slow: steps by number that take so many times as long."""

    def __init__(self, cost: Cost, clock: Clock, num_slots: int, budget: int, timings: Sequence[Timing] = ()) -> None:
        self.num_slots = num_slots
        self.vocab_size = 100
        self.device = torch.device("cpu")
        self.timings = timings
        self.steps: list[Step] = []
        self.slow: dict[int, float] = {}
        self._cost = cost
        self._sizes = graph_sizes(num_slots), mixed_sizes(budget)
        self._clock = clock
        self._free_at = 0.0

    def launch(self, step: Step) -> SimulatedPending:
        size = padded_size(self._sizes[bool(step.chunks)], step.width)
        seconds = self._cost(size, step.num_decoding + len(step.chunks)) * self.slow.get(len(self.steps), 1.0)
        self.steps.append(step)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return SimulatedPending(self._clock, self._free_at, len(step.draws))

    def forbid(self, token_ids: Sequence[int]) -> None: ...

    def describe(self, model_name: str, load_s: float) -> EngineReady:
        return EngineReady(model_name, self.vocab_size, 1, 64, "cpu", "float32", "float32", "none", self.num_slots, 0, load_s)


@dataclass
class Arrival:
    """A request that comes at a time, and when its tokens came."""

    at: float
    prompt_length: int
    max_tokens: int
    times: list[float] = field(default_factory=list)
    is_finished: bool = False

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.at


class Simulation:
    """An engine on a simulated device, and the requests it was given."""

    def __init__(
        self, cost: Cost, num_slots: int, budget: int = 4096, timings: Sequence[Timing] = (), **settings: float
    ) -> None:
        self.clock = Clock()
        self.runner = SimulatedRunner(cost, self.clock, num_slots, budget, timings)
        config = EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=budget, run_ahead=1, **settings)  # type: ignore[arg-type]
        self.core = EngineCore(config, self.runner, self.clock)
        self.num_drawn = 0
        self.streams: dict[int, Arrival] = {}

    def add(self, prompt_length: int, max_tokens: int) -> Arrival:
        arrival = Arrival(self.clock.now, prompt_length, max_tokens)
        self.submit(arrival)
        return arrival

    def submit(self, arrival: Arrival) -> None:
        stream_id = len(self.streams) + 1
        self.streams[stream_id] = arrival
        params = SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True)
        self.core.add(AddRequest((stream_id,), pack_ids([2] * arrival.prompt_length), params))

    def step(self) -> list[Arrival]:
        """Returns those that ended."""
        output = self.core.step()
        for stream_id in unpack_ids(output.stream_ids):
            self.streams[stream_id].times.append(self.clock.now)
            self.num_drawn += 1
        ended = [self.streams[finish.stream_id] for finish in output.finished]
        for arrival in ended:
            arrival.is_finished = True
        return ended

    def run_until(self, *arrivals: Arrival, most: int = 20_000) -> None:
        for _ in range(most):
            if all(arrival.is_finished for arrival in arrivals):
                return
            self.step()
        raise RuntimeError(f"unfinished after {most} steps")

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Lets all of them come at their times, and runs until they have ended."""
        coming = sorted(arrivals, key=lambda arrival: arrival.at)
        all_arrivals = list(coming)
        while coming or not all(arrival.is_finished for arrival in all_arrivals):
            while coming and coming[0].at <= self.clock.now:
                self.submit(coming.pop(0))
            self.step()

    def warm(self, number: int) -> list[Arrival]:
        """Starts so many streams without end, and runs until all of them decode."""
        streams = [self.add(5, 30_000) for _ in range(number)]
        while not all(stream.times for stream in streams):
            self.step()
        for _ in range(4):
            self.step()
        return streams


def longest_gap(streams: Iterable[Arrival], since: float) -> float:
    """Seconds between two tokens of one of the streams, from a time on."""
    return max(
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.times)
        if later > since
    )


def measured(cost: Cost, num_slots: int, budget: int, factor: float = 1.0) -> list[Timing]:
    """What a card finds out at its start: decode steps of padding, and a prompt of each size."""
    decode = [Timing(False, size, factor * cost(size, 0)) for size in graph_sizes(num_slots)]
    return decode + [Timing(True, size, factor * cost(size, 1)) for size in mixed_sizes(budget)]


def steps_sat_out(steps: Sequence[Step]) -> dict[int, list[int]]:
    """By stream, the numbers of the steps without it that lie between two with it."""
    last_seen: dict[int, int] = {}
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        for stream, _ in step.draws:
            found[stream.stream_id] += range(last_seen.get(stream.stream_id, number) + 1, number)
            last_seen[stream.stream_id] = number
    return found
