"""Tokens a second of the bare engine, without text, sockets or HTTP, at several numbers of running requests.

    python -m bench.engine [--model demo|FILE|SIZE] [--device cuda] [--concurrency 1 32] [--continuous] [--out FILE]
    python -m bench.engine --generation [--model 7.2b] [--concurrency 128 512] [--top-p 0.3]

Without a mode: decode steps that nothing disturbs. --continuous adds a second figure: requests of --tokens tokens each, every
one that ends replaced at once, at all stages of their lives. --generation sends all requests together and measures until the
last token has come, and how long the first tokens took. A SIZE such as 1.5b is random weights of that shape. On a card
the bound is the time that bytes and products need (`bench.bounds`); on the CPU, what batching gains is of interest.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from albatross.config import EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AbortRequest, AddRequest, StepOutput, pack_ids, unpack_ids
from albatross.engine.model_runner import ModelRunner
from albatross.engine.process import build_core
from albatross.sampling_params import SamplingParams
from bench.bounds import step_cost
from bench.cuda import copy_bandwidth, gemm_rate
from bench.models import PROMPT, add_model, model_setting
from bench.timing import Measured, Result, make_parser, summarise, write_report

TARGET_GAIN = 8.0  # of 32 requests at once against one alone, on the CPU
TARGET_CONTINUOUS = 0.95  # of the undisturbed steps' tokens a second
TARGETS = {("7.2b", 128): 17_500.0, ("7.2b", 512): 28_000.0}  # tokens/s of --generation on an H200
TARGET_FIRST_TOKEN_MS = 300.0
WARM_UP_STEPS = 8
Rates = tuple[float, float]  # of a card: bytes copied and floating-point operations a second


class Generation(NamedTuple):
    """Requests sent together: drawn tokens a second until the last one, and seconds to the first token of each."""

    tokens_per_s: float
    first_token_s: list[float]


class Load:
    """Equal requests in one core, each as long as its parameters allow."""

    def __init__(self, core: EngineCore, params: SamplingParams, prompt: list[int] = PROMPT) -> None:
        self._core = core
        self._params = params
        self._prompt = pack_ids(prompt)
        self._stream_ids = itertools.count(1)

    def tokens_per_s(self, num_requests: int) -> float:
        """Drawn tokens a second from the first request to the last token; the prompts' time is inside."""
        return self.generate(num_requests).tokens_per_s

    def generate(self, num_requests: int) -> Generation:
        started = time.perf_counter()
        self.start([self._params] * num_requests)
        first_token_s: dict[int, float] = {}
        num_drawn = 0
        while self._core.has_work:
            stream_ids = unpack_ids(self._core.step().stream_ids)
            elapsed = time.perf_counter() - started
            num_drawn += len(stream_ids)
            if len(first_token_s) < num_requests:
                for stream_id in stream_ids:
                    first_token_s.setdefault(stream_id, elapsed)
        return Generation(num_drawn / (time.perf_counter() - started), list(first_token_s.values()))

    def time_steps(self, num_requests: int, num_steps: int, repeats: int) -> Measured:
        """Seconds of one decode step, each repeat a window of steps: single calls say little, since steps overlap."""
        windows = []
        for _ in range(repeats):
            stream_ids = self.start([self._params] * num_requests)
            while self._core.stats().num_waiting or self._core.stats().num_running < num_requests:
                self._core.step()
            self._step(WARM_UP_STEPS)
            started = time.perf_counter()
            self._step(num_steps)
            windows.append((time.perf_counter() - started) / num_steps)
            self._empty(stream_ids)
        return summarise(windows)

    def continuous_tokens_per_s(self, num_requests: int, num_tokens: int, num_steps: int, repeats: int) -> Measured:
        """Drawn tokens a second while every request that ends is replaced at once; the first ones end evenly spread."""
        whole = msgspec.structs.replace(self._params, max_tokens=num_tokens)
        lengths = [1 + num_tokens * (i + 1) // num_requests for i in range(num_requests)]
        running = set(self.start([msgspec.structs.replace(whole, max_tokens=length) for length in lengths]))
        self._replace_ended(running, self._step(WARM_UP_STEPS), whole)
        rates = []
        for _ in range(repeats):
            started = time.perf_counter()
            num_drawn = 0
            for _ in range(num_steps):
                outputs = self._step(1)
                num_drawn += len(unpack_ids(outputs[0].stream_ids))
                self._replace_ended(running, outputs, whole)
            rates.append(num_drawn / (time.perf_counter() - started))
        self._empty(tuple(running))
        return summarise(rates)

    def start(self, params: Sequence[SamplingParams], prompt: bytes | None = None) -> tuple[int, ...]:
        """A request for each of `params`, of `prompt` (packed ids) or the load's own. Returns the ids of their streams."""
        stream_ids = tuple(itertools.islice(self._stream_ids, len(params)))
        for stream_id, each in zip(stream_ids, params, strict=True):
            self._core.add(AddRequest((stream_id,), self._prompt if prompt is None else prompt, each))
        return stream_ids

    def _step(self, number: int) -> list[StepOutput]:
        return [self._core.step() for _ in range(number)]

    def _replace_ended(self, running: set[int], outputs: Sequence[StepOutput], params: SamplingParams) -> None:
        ended = {finish.stream_id for output in outputs for finish in output.finished}
        running -= ended
        running.update(self.start([params] * len(ended)))

    def _empty(self, stream_ids: tuple[int, ...]) -> None:
        self._core.abort(AbortRequest(stream_ids))
        while self._core.has_work:
            self._core.step()


def measure(core: EngineCore, args: argparse.Namespace, rates: Rates | None) -> list[Result]:
    load = Load(core, sampling(args))
    results: list[Result] = []
    for number in args.concurrency:
        step = load.time_steps(number, args.steps, args.repeats)
        details = {"ms": step.median * 1e3, "ms_low": step.low * 1e3, "ms_high": step.high * 1e3}
        bound = limit(core, number, rates)
        results.append(Result(f"{args.model}, {number} at once", number / step.median, "tokens/s", bound, details))
        if args.continuous:
            rate = load.continuous_tokens_per_s(number, args.tokens, args.steps, args.repeats)
            undisturbed = results[-1].value
            details = {"tokens_a_request": args.tokens, "low": rate.low, "high": rate.high}
            name = f"{args.model}, {number} at once, continuous arrivals"
            results.append(Result(name, rate.median, "tokens/s", undisturbed, details, TARGET_CONTINUOUS * undisturbed))
    return results


def measure_generation(core: EngineCore, args: argparse.Namespace, rates: Rates | None) -> list[Result]:
    load = Load(core, msgspec.structs.replace(sampling(args), max_tokens=args.tokens))
    results: list[Result] = []
    for number in args.concurrency:
        load.generate(number)  # the first one pays for what is made at first use
        runs = [load.generate(number) for _ in range(args.repeats)]
        rate = summarise([run.tokens_per_s for run in runs])
        name = f"{args.model}, {number} x {args.tokens} tokens"
        details = {"low": rate.low, "high": rate.high, "prompt_tokens": len(PROMPT)}
        bound, target = limit(core, number, rates), TARGETS.get((args.model, number))
        results.append(Result(name, rate.median, "tokens/s", bound, details, target))
        mean = summarise([1e3 * sum(run.first_token_s) / number for run in runs])
        slowest = summarise([1e3 * max(run.first_token_s) for run in runs])
        results.append(Result(f"{name}: first token, mean", mean.median, "ms", target=TARGET_FIRST_TOKEN_MS))
        results.append(Result(f"{name}: first token, last request", slowest.median, "ms", target=TARGET_FIRST_TOKEN_MS))
    return results


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, top_p=args.top_p, ignore_eos=True, seed=1)


def limit(core: EngineCore, num_requests: int, rates: Rates | None) -> float | None:
    """Tokens a second at which a step takes the time its bytes and products need."""
    if rates is None or not isinstance(core.runner, ModelRunner):
        return None
    model, pool = core.runner.model, core.runner.pool
    return num_requests / step_cost(model.config, num_requests, pool.slot_bytes, model.dtype.itemsize).seconds(*rates)


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    add_model(parser)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--state-dtype", default="auto")
    parser.add_argument("--run-ahead", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=64, help="steps a window")
    parser.add_argument("--tokens", type=int, default=400, help="tokens a request, with --continuous and --generation")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    parser.add_argument("--continuous", action="store_true", help="measure with requests that come and go, too")
    parser.add_argument("--generation", action="store_true", help="measure requests that are sent together")
    args = parser.parse_args()
    core = build_core(
        EngineConfig(
            model=model_setting(args.model), device=args.device, state_dtype=args.state_dtype, run_ahead=args.run_ahead,
            max_num_seqs=max(args.concurrency), num_threads=args.threads,
        )
    )  # fmt: skip
    rates = (copy_bandwidth(), gemm_rate()) if core.runner.device.type == "cuda" else None
    results = (measure_generation if args.generation else measure)(core, args, rates)
    if rates is None and len(args.concurrency) > 1 and not args.generation:
        found = [result.value for result in results if result.name.endswith("at once")]
        results.append(Result(f"gain of {args.concurrency[-1]} at once", found[-1] / found[0], "x", TARGET_GAIN))
    write_report(results, args.out)


if __name__ == "__main__":
    main()
