"""Tokens a second of the bare engine step, without text, sockets or HTTP, at several numbers of running requests.

    python -m bench.engine [--model demo|FILE|SIZE] [--device cuda] [--concurrency 1 32] [--out FILE]

A SIZE such as 1.5b is a random checkpoint of that shape (`albatross synth`). On the CPU the figure of interest is what
batching gains; on a card it is the step beside the time its bytes need: all weights once, each state in and out.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from albatross.config import DEMO_MODEL, EngineConfig
from albatross.engine.core import EngineCore
from albatross.engine.messages import AbortRequest, AddRequest, pack_ids, unpack_ids
from albatross.engine.model_runner import ModelRunner
from albatross.engine.process import build_core
from albatross.models.synth import SIZES, write_checkpoint
from albatross.sampling_params import SamplingParams
from bench.timing import Measured, Result, make_parser, summarise, write_report

TARGET_GAIN = 8.0  # of 32 requests at once against one alone, on the CPU
PROMPT = [24, 117, 11, 12, 256]
WARM_UP_STEPS = 8


class Load:
    """Equal requests in one core, each as long as its parameters allow."""

    def __init__(self, core: EngineCore, params: SamplingParams, prompt: list[int] = PROMPT) -> None:
        self._core = core
        self._params = params
        self._prompt = pack_ids(prompt)
        self._stream_ids = itertools.count(1)

    def tokens_per_s(self, num_requests: int) -> float:
        """Drawn tokens a second from the first request to the last token; the prompts' time is inside."""
        started = time.perf_counter()
        self._start(num_requests)
        num_drawn = 0
        while self._core.has_work:
            num_drawn += len(unpack_ids(self._core.step().token_ids))
        return num_drawn / (time.perf_counter() - started)

    def time_steps(self, num_requests: int, num_steps: int, repeats: int) -> Measured:
        """Seconds of one decode step; the median of each repeat's median."""
        medians = []
        for _ in range(repeats):
            stream_ids = self._start(num_requests)
            while self._core.stats().num_waiting or self._core.stats().num_running < num_requests:
                self._core.step()
            for _ in range(WARM_UP_STEPS):
                self._core.step()
            medians.append(statistics.median(self._time_step() for _ in range(num_steps)))
            self._core.abort(AbortRequest(stream_ids))
        return summarise(medians)

    def _start(self, num_requests: int) -> tuple[int, ...]:
        stream_ids = tuple(next(self._stream_ids) for _ in range(num_requests))
        for stream_id in stream_ids:
            self._core.add(AddRequest((stream_id,), self._prompt, self._params))
        return stream_ids

    def _time_step(self) -> float:
        started = time.perf_counter()
        self._core.step()
        return time.perf_counter() - started


@contextmanager
def model_path(model: str) -> Iterator[str]:
    """The path of a model, or of a random checkpoint written for the occasion."""
    if model not in SIZES:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"synth-{model}.pth"
        write_checkpoint(model, path, dtype=torch.float16)
        yield str(path)


def step_bytes(runner: ModelRunner, num_requests: int) -> int:
    """What one decode step must move at least: the weights (of the embedding only the rows drawn) and the states twice."""
    config, width = runner.model.config, runner.model.dtype.itemsize
    layer = config.hidden_size * (
        4 * config.hidden_size + 2 * config.ffn_size + 2 * (config.w_rank + config.a_rank + config.v_rank + config.g_rank)
    )
    weights = config.num_layers * layer + config.hidden_size * config.vocab_size
    return weights * width + 2 * num_requests * runner.pool.slot_bytes


def measure(core: EngineCore, args: argparse.Namespace, bandwidth: float | None) -> list[Result]:
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, ignore_eos=True, seed=1)
    load, runner = Load(core, params), core.runner
    results: list[Result] = []
    for number in args.concurrency:
        step = load.time_steps(number, args.steps, args.repeats)
        details = {"ms": step.median * 1e3, "ms_low": step.low * 1e3, "ms_high": step.high * 1e3}
        bound = None
        if bandwidth is not None and isinstance(runner, ModelRunner):
            details["bytes"] = step_bytes(runner, number)
            bound = number * bandwidth / details["bytes"]
        results.append(Result(f"{args.model}, {number} at once", number / step.median, "tokens/s", bound, details))
    return results


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEMO_MODEL, help="a checkpoint, 'demo', or the size of a random one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=64, help="decode steps a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    args = parser.parse_args()
    with model_path(args.model) as path:
        core = build_core(
            EngineConfig(
                model=path, device=args.device, state_dtype=args.state_dtype,
                max_num_seqs=max(args.concurrency), num_threads=args.threads,
            )
        )  # fmt: skip
    bandwidth = None
    if core.runner.device.type == "cuda":
        from bench.wkv7 import copy_bandwidth

        bandwidth = copy_bandwidth()
    results = measure(core, args, bandwidth)
    if bandwidth is None and len(results) > 1:
        results.append(Result(f"gain of {args.concurrency[-1]} at once", results[-1].value / results[0].value, "x", TARGET_GAIN))
    write_report(results, args.out)


if __name__ == "__main__":
    main()
