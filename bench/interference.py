"""What prompts cost the streams that run beside them, and the streams them: by the bare engine, without text or HTTP.

    python -m bench.interference [--model 7.2b] [--streams 64] [--prompt-tokens 32768] [--short-tokens 512] [--every-ms 100]
                                 [--device auto] [--out FILE]

First the long prompt alone, then the decode step of streams that nothing disturbs. Then both: the gaps between the tokens of
each stream, in normal steps, and the prompt's speed as a share of what it is alone. At last short prompts that arrive one every
so many milliseconds, and how long each waits for its first token. Whoever arrives in the middle of a step waits for its end.
"""

import argparse
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import pack_ids, unpack_ids
from albatross.engine.process import build_core
from albatross.sampling_params import SamplingParams
from bench.engine import WARM_UP_STEPS, Load
from bench.models import PROMPT, add_model, model_setting
from bench.timing import Result, make_parser, percentile, write_report

BOUND_GAP_STEPS = 5.0
TARGET_SHARE = 0.6  # of the speed that the long prompt has alone
BOUND_FIRST_TOKEN_MS = 60.0
SPARE_SLOTS = 16  # beyond those of the streams, for the prompts beside them
ENDLESS_TOKENS = 1 << 30  # more than a stream draws in any run
ENDLESS = SamplingParams(ignore_eos=True, seed=1, max_tokens=ENDLESS_TOKENS)
ONE_TOKEN = msgspec.structs.replace(ENDLESS, max_tokens=1)


class Streams:
    """Streams that run without an end, the gaps between their tokens, and prompts that are read beside them."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.perf_counter) -> None:
        self._core, self._clock = core, clock
        self._load = Load(core, ENDLESS)
        self._last: dict[int, float] = {}  # when each stream's latest token came
        self._gaps: list[float] = []

    def start(self, number: int) -> None:
        """Starts streams and returns when each has drawn a token."""
        waiting = set(self._load.start([ENDLESS] * number))
        started = waiting.copy()
        while waiting:
            waiting -= self.step()
        self._last = dict.fromkeys(started, self._clock())
        self._gaps.clear()

    def step(self) -> set[int]:
        """One step of the engine. Returns the streams that drew."""
        drawn = set(unpack_ids(self._core.step().stream_ids))
        now = self._clock()
        for stream_id in drawn & self._last.keys():
            self._gaps.append(now - self._last[stream_id])
            self._last[stream_id] = now
        return drawn

    def take_gaps(self) -> list[float]:
        """Seconds between two tokens of one stream: all gaps since the last call."""
        gaps, self._gaps = self._gaps, []
        return gaps

    def time_step(self, num_steps: int) -> float:
        """Seconds of a step that nothing disturbs: the median of so many."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        self.take_gaps()
        for _ in range(num_steps):
            self.step()
        return statistics.median(self.take_gaps())

    def read(self, num_tokens: int, arrivals: Sequence[float] = (0.0,)) -> list[float]:
        """A prompt of `num_tokens` arrives at each of these times, in rising seconds from the call on.

        Returns when all have been read: the seconds from each one's arrival to its first token, in order of these.
        """
        prompt = pack_ids(itertools.islice(itertools.cycle(PROMPT), num_tokens))
        begun, due = self._clock(), deque(arrivals)
        arrived: dict[int, float] = {}
        seconds = []
        while due or arrived:
            while due and self._clock() - begun >= due[0]:
                (stream_id,) = self._load.start([ONE_TOKEN], prompt)
                arrived[stream_id] = due.popleft()
            ended = self.step() & arrived.keys()
            now = self._clock() - begun
            seconds += [now - arrived.pop(stream_id) for stream_id in ended]
        return seconds


def measure(core: EngineCore, args: argparse.Namespace, clock: Callable[[], float] = time.perf_counter) -> list[Result]:
    streams = Streams(core, clock)
    streams.read(args.prompt_tokens)  # pays for what is made at first use
    alone = statistics.median(args.prompt_tokens / streams.read(args.prompt_tokens)[0] for _ in range(args.repeats))
    streams.start(args.streams)
    step = streams.time_step(args.steps)
    beside = [args.prompt_tokens / streams.read(args.prompt_tokens)[0] for _ in range(args.repeats)]
    gaps = [gap / step for gap in streams.take_gaps()]
    arrivals = [number * args.every_ms / 1e3 for number in range(args.arrivals)]
    times = [1e3 * seconds for seconds in streams.read(args.short_tokens, arrivals)]
    short_gaps = [gap / step for gap in streams.take_gaps()]
    long, short = f"prompt of {args.prompt_tokens:,}", f"prompts of {args.short_tokens:,}"
    speeds, every = {"low": min(beside), "high": max(beside)}, {"every_ms": args.every_ms, "arrivals": args.arrivals}
    results = [
        Result("undisturbed step", step * 1e3, "ms"),
        Result(f"{long} alone", alone, "tokens/s"),
        Result(f"{long} beside them", statistics.median(beside), "tokens/s", alone, speeds, TARGET_SHARE * alone),
        Result(f"longest gap beside a {long}", max(gaps), "steps", BOUND_GAP_STEPS),
        Result(f"99 % of gaps beside a {long}", percentile(gaps, 99), "steps", BOUND_GAP_STEPS),
        Result(f"first token of {short}, mean", statistics.fmean(times), "ms", BOUND_FIRST_TOKEN_MS, every),
        Result(f"first token of {short}, 99 %", percentile(times, 99), "ms", BOUND_FIRST_TOKEN_MS, every),
        Result(f"longest gap beside {short}", max(short_gaps), "steps", BOUND_GAP_STEPS, every),
    ]
    return [with_heading(f"{args.model}, {args.streams} streams", result) for result in results]


def with_heading(heading: str, result: Result) -> Result:
    details = {"beside": heading, "figure": result.name, **result.details}
    return replace(result, name=f"{heading}: {result.name}", details=details)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    add_model(parser)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--state-dtype", default="auto")
    parser.add_argument("--token-budget", type=int, default=0, help="max_num_batched_tokens; 0 leaves it to the engine")
    parser.add_argument("--streams", type=int, default=64, help="requests that run all the while")
    parser.add_argument("--prompt-tokens", type=int, default=32_768, help="of the long prompt")
    parser.add_argument("--short-tokens", type=int, default=512, help="of each short prompt")
    parser.add_argument("--every-ms", type=float, default=100.0, help="between two arrivals of short prompts")
    parser.add_argument("--arrivals", type=int, default=100, help="short prompts")
    parser.add_argument("--steps", type=int, default=256, help="undisturbed steps that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="readings of the long prompt, alone and beside the streams")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    config = EngineConfig(
        model=model_setting(args.model), device=args.device, state_dtype=args.state_dtype, num_threads=args.threads,
        max_num_seqs=args.streams + SPARE_SLOTS, max_num_batched_tokens=args.token_budget, max_output_tokens=ENDLESS_TOKENS,
    )  # fmt: skip
    write_report(measure(build_core(config), args), args.out)


if __name__ == "__main__":
    main()
