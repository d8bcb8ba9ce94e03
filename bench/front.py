"""How many tokens a second one front process delivers: the real server, a fake engine process, many streaming clients.

The server runs on core 0, fake engine and client share core 1, so the figure is that of one core. The engine offers
`--rate` tokens a second; if the front keeps up, its load says how much room is left, else the delivered rate is its limit.
Needs Linux, for the CPU time of another process.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bench.front_server import OTHERS_CORE
from bench.load import LoadReport, run_load, running_server
from bench.timing import Result, make_parser, percentile, pin_to_core, summarise, write_report

TARGET = 60_000  # tokens a second of one front on one core
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """One load: what the clients saw, and the CPU time that the server's process and the clients' took for it."""

    report: LoadReport
    server_cpu_s: float
    client_cpu_s: float

    @property
    def rate(self) -> float:
        return self.report.num_tokens / self.report.delivery_s


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=600, help="tokens a stream")
    parser.add_argument("--rate", type=float, default=66_000, help="tokens a second that the engine offers")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    write_report(_measure(arguments), arguments.out)


def _measure(arguments: argparse.Namespace) -> list[Result]:
    pin_to_core(OTHERS_CORE)
    options = ("--streams", str(arguments.streams), "--rate", str(arguments.rate))
    with running_server("-m", "bench.front_server", *options) as (process, port):
        rounds = [_run_round(process.pid, port, arguments) for _ in range(1 + arguments.repeats)][1:]
    gaps = [gap for one in rounds for gap in one.report.gaps]
    num_tokens = sum(one.report.num_tokens for one in rounds)
    server_cpu_s = sum(one.server_cpu_s for one in rounds)
    client_cpu_s = sum(one.client_cpu_s for one in rounds)
    total_s = sum(one.report.total_s for one in rounds)
    facts = {"streams": arguments.streams, "tokens_a_stream": arguments.tokens, "repeats": len(rounds)}
    return [
        summarise([one.rate for one in rounds]).as_result("delivered", "tokens/s", TARGET, facts),
        Result("offered", arguments.rate, "tokens/s"),
        Result("load of the server", server_cpu_s / total_s, "cores"),
        Result("load of the clients", client_cpu_s / total_s, "cores"),
        Result("CPU time of the server", 1e6 * server_cpu_s / num_tokens, "us/token"),
        Result("events a token", sum(one.report.num_events for one in rounds) / num_tokens, ""),
        Result("gap p50", 1e3 * percentile(gaps, 50), "ms"),
        Result("gap p99", 1e3 * percentile(gaps, 99), "ms"),
    ]


def _run_round(pid: int, port: int, arguments: argparse.Namespace) -> Round:
    body = {"prompt": "Hello", "max_tokens": arguments.tokens, "ignore_eos": True}
    server_before, client_before = _cpu_seconds(pid), time.process_time()
    report = run_load(port, [body] * arguments.streams)
    client_cpu_s = time.process_time() - client_before
    time.sleep(0.3)  # the server closes its streams
    return Round(report, _cpu_seconds(pid) - server_before, client_cpu_s)


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, at the clock tick's resolution (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


if __name__ == "__main__":
    main()
