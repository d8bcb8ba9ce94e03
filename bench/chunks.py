"""Errors of time mixing over a prompt against float64: by `tmix_prefill`, 16 tokens at a time on a card, and token by token.

    python -m bench.chunks [--device cuda] [--lengths 16 4096] [--out FILE]

Random products of NUM_HEADS heads in fp16, at three strengths of decay, from a random state. An error is that of the whole
output, or of the state that is left. On the CPU both ways are the same arithmetic.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from albatross import ops
from albatross.engine.model_runner import resolve_device
from albatross.ops.tmix import prefill_by_scan
from albatross.reference import tmix as reference
from bench.drift import as_result, relative_error
from bench.timing import Result, make_parser, write_report
from bench.vectors import random_products

NUM_HEADS = 16
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4096)
DECAYS = {"weak": -8.0, "mixed": 0.0, "strong": 6.0}  # mean of the decay's bias
WAYS: dict[str, Callable[..., None]] = {"chunks": ops.tmix_prefill, "scan": prefill_by_scan}
HEADING = "time mixing over a prompt: error at tokens"


def errors(length: int, bias: float, state_dtype: torch.dtype, device: torch.device) -> dict[tuple[str, str], float]:
    """By way, and by what it leaves: the state or the output."""
    torch.manual_seed(length)
    products = random_products(length, NUM_HEADS, device)
    products["w0"] += bias
    start = 0.5 * torch.randn(1, NUM_HEADS, 64, 64, device=device).to(state_dtype)
    rows = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, length], [0])]

    def run(way: Callable[..., None], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        state, out = start.clone().to(dtype), torch.empty_like(products["r"], dtype=dtype)
        way(state, *(x.to(dtype) for x in products.values()), *rows, out)
        return state, out

    expected = run(reference.tmix_prefill, torch.float64)
    return {
        (name, what): relative_error(found, exact)
        for name, way in WAYS.items()
        for what, found, exact in zip(("state", "output"), run(way), expected, strict=True)
    }


def measure(lengths: Sequence[int], device: torch.device) -> list[Result]:
    results = []
    for state, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        for decay, bias in DECAYS.items():
            found = [errors(length, bias, dtype, device) for length in lengths]
            for name, what in found[0]:
                title = f"{name}, {state} state, {decay} decay: {what}"
                values = [of_length[name, what] for of_length in found]
                results.append(as_result(title, "relative error", lengths, values, HEADING))
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of a prompt")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    device = torch.device(resolve_device(args.device))
    if device.type == "cuda":
        ops.load_native(device)
    with torch.inference_mode():
        results = measure(args.lengths, device)
    write_report(results, args.out)


if __name__ == "__main__":
    main()
