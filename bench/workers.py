"""Tokens a second of several workers against one: the same backlog of requests through the engine client, without HTTP.

    python -m bench.workers [--model demo|FILE|SIZE] [--workers 1 2] [--concurrency 256] [--out FILE]

Each worker has `--concurrency` slots. The backlog fills the slots of the largest number of workers `--waves` times, so every
card runs full batches to the end and the figures differ by the number of cards alone. A SIZE such as 1.5b is a model of
random weights. On the CPU, give each worker its share of the cores by `--threads`.
"""

import argparse
import asyncio
import time
from typing import NamedTuple

from albatross.config import EngineConfig
from albatross.engine.client import EngineClient
from albatross.sampling_params import SamplingParams
from bench.models import PROMPT, add_model, model_setting
from bench.timing import Result, make_parser, summarise, write_report

TARGET_SHARE = 0.95  # of as many times the tokens a second as there are workers
_POLL_S = 0.01  # between two looks at all choices: a reader that is woken for every token would be measured as well


class Round(NamedTuple):
    """One backlog: tokens a second, and how busy the front's process was meanwhile (1: its core was the limit)."""

    tokens_per_s: float
    front_load: float


async def run_backlog(client: EngineClient, num_requests: int, params: SamplingParams) -> Round:
    """From the first request to the last token. Raises RuntimeError if a request does not run to its full length."""
    started, cpu_started = time.perf_counter(), time.process_time()
    choices = [client.generate([PROMPT], params).choices[0] for _ in range(num_requests)]
    running = choices
    while running:
        await asyncio.sleep(_POLL_S)
        for choice in running:
            choice.take()
        running = [choice for choice in running if choice.finish_reason is None]
    elapsed = time.perf_counter() - started
    cut_off = next((choice for choice in choices if choice.finish_reason != "length"), None)
    if cut_off is not None:
        raise RuntimeError(f"A request ended with {cut_off.finish_reason}: {cut_off.error}")
    num_tokens = sum(choice.num_tokens for choice in choices)
    return Round(num_tokens / elapsed, (time.process_time() - cpu_started) / elapsed)


async def measure(args: argparse.Namespace, num_workers: int) -> list[Round]:
    """The rounds after a first one that warms up."""
    num_requests = args.waves * args.concurrency * max(args.workers)
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, ignore_eos=True, max_tokens=args.tokens)
    config = EngineConfig(
        model=model_setting(args.model), device=args.device, workers=num_workers,
        max_num_seqs=args.concurrency, max_queued_requests=num_requests, num_threads=args.threads,
    )  # fmt: skip
    client = await EngineClient.start(config)
    try:
        await client.wait_ready()
        rounds = [await run_backlog(client, num_requests, params) for _ in range(1 + args.repeats)]
    finally:
        await client.close()
    return rounds[1:]


def measure_all(args: argparse.Namespace) -> list[Result]:
    facts = {
        "slots_a_worker": args.concurrency, "tokens_a_request": args.tokens,
        "requests": args.waves * args.concurrency * max(args.workers), "repeats": args.repeats,
    }  # fmt: skip
    results: list[Result] = []
    for number in args.workers:
        rounds = asyncio.run(measure(args, number))
        load = max(one.front_load for one in rounds)
        rates = summarise([one.tokens_per_s for one in rounds])
        results.append(rates.as_result(f"{args.model}, workers {number}", "tokens/s", details={**facts, "front_load": load}))
    base, base_rate = args.workers[0], results[0].value
    for number, result in zip(args.workers[1:], results[1:], strict=True):
        bound = number / base
        name = f"{args.model}, workers {number} against {base}"
        results.append(Result(name, result.value / base_rate, "x", bound, target=TARGET_SHARE * bound))
    return results


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    add_model(parser)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, default=256, help="slots of each worker")
    parser.add_argument("--waves", type=int, default=2, help="how often the backlog fills all slots of the most workers")
    parser.add_argument("--tokens", type=int, default=400, help="tokens a request")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each worker; 0 shares torch's number")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    write_report(measure_all(args), args.out)


if __name__ == "__main__":
    main()
