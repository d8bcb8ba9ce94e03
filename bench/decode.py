"""The bare decode step at many numbers of rows: embedding, layers, head and draw, as one replay of the engine's own graph.

    python -m bench.decode [--models 1.5b 7.2b] [--rows 1 32 960] [--state-dtype float16] [--profile [ROWS]]
                           [--plot FILE.svg] [--out FILE]

Models are synthetic, made on the card. A figure is tokens a second, the median of many replays timed by events, beside the
least time that the bytes and the matrix products allow at the rates this card reaches in the same run. `--profile` adds what
each kernel takes.
"""

import argparse
import gc
from functools import partial
from pathlib import Path

import torch

from albatross.config import EngineConfig
from albatross.engine.messages import AddRequest, pack_ids
from albatross.engine.model_runner import ModelRunner
from albatross.engine.request import Request
from albatross.models.synth import SIZES
from albatross.sampling_params import SamplingParams
from bench.bounds import StepCost, step_cost
from bench.cuda import copy_bandwidth, gemm_rate, need_cuda, time_each
from bench.models import model_setting
from bench.plot import decode_plot
from bench.profile import Work, profile_steps
from bench.timing import Result, make_parser, summarise, write_report

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 960)
MODELS = ("0.1b", "1.5b", "7.2b")
WARM_UP_STEPS = 8
TARGETS = {  # tokens/s on an H200, fp16 weights and state
    "7.2b": {1: 340, 8: 2_000, 32: 7_000, 128: 20_000, 256: 28_000, 960: 33_000},
    "1.5b": {1: 1_100, 8: 7_000, 32: 20_000, 256: 90_000, 960: 120_000},
}


class DecodeStep:
    """A synthetic model with every slot running, and the step of the first so many of them."""

    def __init__(self, model: str, num_slots: int, state_dtype: str, params: SamplingParams) -> None:
        self.runner = ModelRunner(
            EngineConfig(model=model_setting(model), device="cuda", state_dtype=state_dtype, max_num_seqs=num_slots)
        )
        request = Request.from_message(AddRequest(tuple(range(num_slots)), pack_ids([1]), params), 1 << 30)
        for stream in request.streams:
            stream.slot = stream.choice
        self.runner.sampler.assign(request)

    def run(self, num_rows: int) -> None:
        """Gives one step to the device; the tokens it draws are what the next one reads."""
        assert self.runner.graphs is not None  # on CUDA, and nothing here switches them off
        self.runner.graphs.run_decode(range(num_rows))

    def cost(self, num_rows: int) -> StepCost:
        model = self.runner.model
        return step_cost(model.config, num_rows, self.runner.pool.slot_bytes, model.dtype.itemsize)


@torch.inference_mode()
def measure(model: str, args: argparse.Namespace, bandwidth: float, gemms: float) -> list[Result]:
    """The figures of one model; with --profile those of its kernels too."""
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, seed=1, ignore_eos=True,
        presence_penalty=args.penalty, frequency_penalty=args.penalty,
    )  # fmt: skip
    step = DecodeStep(model, max(args.rows), args.state_dtype, params)
    results = []
    for rows in args.rows:
        for _ in range(WARM_UP_STEPS):
            step.run(rows)
        seconds = summarise(time_each(partial(step.run, rows), args.repeats))
        cost = step.cost(rows)
        details = {
            "model": model, "rows": rows, "state_dtype": args.state_dtype,
            "ms": seconds.median * 1e3, "ms_low": seconds.low * 1e3, "ms_high": seconds.high * 1e3,
            "bound_ms": cost.seconds(bandwidth, gemms) * 1e3, "limit": cost.limit(bandwidth, gemms),
            "bytes": cost.num_bytes, "flops": cost.flops,
            "gb_s": cost.num_bytes / seconds.median / 1e9, "tflop_s": cost.flops / seconds.median / 1e12,
        }  # fmt: skip
        title = f"decode {model}, {rows} rows, {args.state_dtype} state"
        bound = rows / cost.seconds(bandwidth, gemms)
        target = TARGETS.get(model, {}).get(rows) if args.state_dtype == "float16" else None
        results.append(Result(title, rows / seconds.median, "tokens/s", bound, details, target))
        if args.profile is not None and rows in (args.profile or args.rows):
            known = {
                "products": Work(cost.weight_bytes, bandwidth, "GB/s"), "recurrence": Work(cost.state_bytes, bandwidth, "GB/s")
            }  # fmt: skip
            results += profile_steps(title, partial(step.run, rows), known)
    return results


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--state-dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.3)
    parser.add_argument("--penalty", type=float, default=0.0, help="presence and frequency penalty of every row")
    parser.add_argument("--repeats", type=int, default=50, help="steps that are timed at each number of rows")
    parser.add_argument("--profile", type=int, nargs="*", help="what each kernel takes, too: at these rows, or at all")
    parser.add_argument("--plot", type=Path, help="write time per step against rows to this SVG file")
    args = parser.parse_args()
    need_cuda("bench.decode")
    bandwidth, gemms = copy_bandwidth(), gemm_rate()
    results = [Result("copy", bandwidth / 1e9, "GB/s"), Result("GEMM", gemms / 1e12, "TFLOP/s")]
    for model in args.models:
        results += measure(model, args, bandwidth, gemms)
        gc.collect()  # graphs, model and pool refer to each other
        torch.cuda.empty_cache()
    write_report(results, args.out)
    if args.plot:
        args.plot.write_text(decode_plot([result.details for result in results]))


if __name__ == "__main__":
    main()
