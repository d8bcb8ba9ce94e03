"""Times the kernels between the matrix products on one CUDA card, as bytes a second beside what a copy reaches in the same run.

    python -m bench.tmix [--out FILE] [--rows N ...] [--widths C ...]

Each figure is the median of replays of one CUDA graph of many calls. Every call works on states of its own, as every layer of a
step does; activations are the same in all calls and stay in the L2 cache, as they do in a step of few rows. A figure above the
copy's says that they did.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from albatross import ops
from bench.cuda import DEVICE, DTYPES, bytes_result, open_card, time_graph
from bench.timing import Result, make_parser, write_report

DECODE_ROWS = 960  # what is more than that is measured as the tokens of one prompt, without the decode step's kernel
ROWS = (1, 32, 256, DECODE_ROWS, 4096)
WIDTHS = (2048, 4096)  # of a 1.5B and a 7.2B model
NUM_MIXES = 6
NUM_LAYERS = 64  # calls of the kernels whose states are small
WORKING_SET_BYTES = 1 << 30  # far beyond any L2 cache,
MAX_POOLS = 256  # unless that takes more calls than this: 64 MiB for one row of fp16 at width 2048, more than an H200's 50 MiB
Call = Callable[[], None]


def bind(op: Callable[..., None], *arguments: object) -> Call:
    return partial(op, *arguments)


class Inputs:
    """Activations and constants of one layer for `num_rows` tokens, in fp16: those of as many sequences, or of one prompt."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.num_rows, self.width = num_rows, width
        self.rows = [torch.randn(num_rows, width, device=DEVICE).half() for _ in range(8)]
        self.constants = [torch.randn(width, device=DEVICE) for _ in range(5)]
        self.readout = [0.3 * torch.randn(width // 64, 64, device=DEVICE), *torch.randn(2, width, device=DEVICE).unbind()]
        places = torch.arange(num_rows + 1, device=DEVICE, dtype=torch.int32)
        self.is_prompt = num_rows > DECODE_ROWS
        self.bounds = places[:: num_rows if self.is_prompt else 1].contiguous()
        self.token_rows = places[:-1].clone().clamp_(max=len(self.bounds) - 2)
        self.slots = torch.randperm(len(self.bounds) - 1, device=DEVICE).int()
        self.out = torch.empty(6, num_rows, width, device=DEVICE, dtype=torch.float16)

    def tmix_decode(self, dtype: torch.dtype) -> tuple[list[Call], int]:
        """The calls and the bytes one of them moves."""
        state_bytes = self.num_rows * self.width * 64 * dtype.itemsize
        num_pools = max(1, min(MAX_POOLS, WORKING_SET_BYTES // state_bytes))
        pools = torch.zeros(self.num_rows, num_pools, self.width // 64, 64, 64, dtype=dtype, device=DEVICE)
        arguments = (*self.rows, *self.constants, *self.readout, self.slots, self.out[0])
        calls = [bind(ops.tmix_decode, pool, *arguments) for pool in pools.unbind(1)]
        return calls, 2 * state_bytes + 9 * self.out[0].nbytes

    def add_norm_mix(self, num_mixes: int) -> tuple[list[Call], int]:
        x, x_out = torch.randn(2, self.num_rows, self.width, device=DEVICE).unbind()
        shifts = torch.zeros(len(self.slots), NUM_LAYERS, self.width, device=DEVICE, dtype=torch.float16)
        mix = torch.rand(num_mixes, self.width, device=DEVICE).half()
        rows = (self.bounds, self.token_rows, self.slots)
        arguments = (x, self.rows[0], *self.readout[1:], mix)
        mixed = self.out[:num_mixes]
        calls = [bind(ops.add_norm_mix, *arguments, shift, *rows, x_out, mixed) for shift in shifts.unbind(1)]
        return calls, 2 * x.nbytes + 2 * shifts[:, 0].nbytes + (1 + num_mixes) * self.out[0].nbytes + mix.nbytes

    def add_norm(self) -> tuple[list[Call], int]:
        x, index = torch.randn(self.num_rows, self.width, device=DEVICE), torch.arange(self.num_rows, device=DEVICE)
        call = bind(ops.add_norm, x, self.rows[0], *self.readout[1:], index, self.out[0])
        return [call] * NUM_LAYERS, x.nbytes + 2 * self.out[0].nbytes

    def tmix_prepare(self) -> tuple[list[Call], int]:
        _, *products = self.rows[:6]
        call = bind(ops.tmix_prepare, *products, self.rows[6], *self.constants, *self.out[:5])
        return [call] * NUM_LAYERS, 11 * self.out[0].nbytes

    def tmix_readout(self) -> tuple[list[Call], int]:
        call = bind(ops.tmix_readout, *self.rows[:5], *self.readout, self.out[0])
        return [call] * NUM_LAYERS, 6 * self.out[0].nbytes

    def squared_relu(self) -> tuple[list[Call], int]:
        hidden = torch.zeros(self.num_rows, 4 * self.width, device=DEVICE, dtype=torch.float16)
        return [bind(ops.squared_relu, hidden)] * NUM_LAYERS, 2 * hidden.nbytes


def bench(num_rows: int, width: int, bandwidth: float) -> list[Result]:
    inputs = Inputs(num_rows, width)
    dtypes = {} if inputs.is_prompt else DTYPES
    kernels: dict[str, Callable[[], tuple[list[Call], int]]] = {
        **{f"tmix_decode, {name} state": partial(inputs.tmix_decode, dtype) for name, dtype in dtypes.items()},
        **{f"add_norm_mix, {count} mixes": partial(inputs.add_norm_mix, count) for count in (1, NUM_MIXES)},
        "add_norm": inputs.add_norm,
        "tmix_prepare": inputs.tmix_prepare,
        "tmix_readout": inputs.tmix_readout,
        "squared_relu": inputs.squared_relu,
    }
    results = []
    for name, make in kernels.items():
        calls, num_bytes = make()
        results.append(bytes_result(f"{name}, {num_rows} x {width}", time_graph(calls), num_bytes, bandwidth))
        del calls  # and with them the states
    return results


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="tokens of a call")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="channels of a token")
    return parser.parse_args()


def main() -> None:
    args = parse(make_parser(__doc__ or ""))
    bandwidth, results = open_card("bench.tmix")
    for width in args.widths:
        for num_rows in args.rows:
            results += bench(num_rows, width, bandwidth)
    write_report(results, args.out)


if __name__ == "__main__":
    main()
