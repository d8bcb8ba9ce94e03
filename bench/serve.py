"""What HTTP costs: the same requests through the server, many streaming clients, and through the engine core alone.

Both run in turns on the same machine, the server's engine idle while the core runs in this process and the reverse, so
that slow phases of the machine hit both. The cost is the tokens a second that are lost on the way through HTTP.
"""

import argparse
from typing import Any

from albatross.config import DEMO_MODEL, EngineConfig
from albatross.engine.process import build_core
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.world import WorldTokenizer
from bench.engine import Load
from bench.load import HOST, LoadReport, run_load, running_server
from bench.timing import Result, make_parser, percentile, summarise, write_report

PROMPT = "User: Tell me a story about a fox.\n\nAssistant:"
TARGET_COST_PERCENT = 10.0  # of the engine's tokens a second
_SERVE = "from albatross.cli.main import main; main()"  # the `albatross` command of the Python that runs this


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="tokens a request")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the engine; 0 leaves it to torch")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    write_report(_measure(arguments), arguments.out)


def _measure(arguments: argparse.Namespace) -> list[Result]:
    settings: dict[str, Any] = {
        "model": arguments.model,
        "device": arguments.device,
        "max_num_seqs": arguments.clients,
        "num_threads": arguments.threads,
    }
    flags = [word for name, value in settings.items() if name != "model" for word in (f"--{name.replace('_', '-')}", str(value))]
    core = build_core(EngineConfig(**settings))
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=1)
    core_load = Load(core, params, WorldTokenizer(core.runner.vocab_size).encode(PROMPT))
    body = {"prompt": PROMPT, "max_tokens": arguments.tokens, "ignore_eos": True, "seed": 1}
    alone, reports = [], []
    with running_server("-c", _SERVE, "serve", arguments.model, *flags, "--host", HOST, "--log-level", "warning") as (_, port):
        for _ in range(1 + arguments.repeats):
            alone.append(core_load.tokens_per_s(arguments.clients))
            reports.append(run_load(port, [body] * arguments.clients))
    return _results(alone[1:], reports[1:], arguments)


def _results(alone: list[float], reports: list[LoadReport], arguments: argparse.Namespace) -> list[Result]:
    through = [report.num_tokens / report.total_s for report in reports]
    costs = [100 * (1 - served / engine) for served, engine in zip(through, alone, strict=True)]
    facts = {"clients": arguments.clients, "tokens_a_request": arguments.tokens, "repeats": len(reports)}
    results = [
        summarise(alone).as_result("engine alone", "tokens/s"),
        summarise(through).as_result("through HTTP", "tokens/s"),
        summarise(costs).as_result("cost of HTTP", "%", TARGET_COST_PERCENT, facts),
    ]
    first = [1e3 * (stream.first_at - stream.sent_at) for report in reports for stream in report.streams]
    gaps = [1e3 * gap for report in reports for gap in report.gaps]
    for name, values in (("first token", first), ("gap", gaps)):
        results += [Result(f"{name} p{percent}", percentile(values, percent), "ms") for percent in (50, 90, 99)]
    return results


if __name__ == "__main__":
    main()
