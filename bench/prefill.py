"""Prompts of many lengths: the recurrence alone, and the whole model from embedding to the logits of each prompt's last token.

    python -m bench.prefill [--models 1.5b 7.2b] [--shapes 1x4096 8x512] [--parts kernel model] [--state-dtype float16]
                            [--profile [SHAPE ...]] [--plot FILE.svg] [--device auto] [--out FILE]

A shape is prompts x tokens of each. The recurrence, and time mixing from products to product, are timed for each model's heads
beside the time that their bytes need. Up to
WHOLE_TOKENS tokens the model reads in one forward pass; what is longer, in pieces of the engine's token budget, in which all
prompts move on together. On a card every figure is of replays of one graph. On the CPU there are no bounds.
"""

import argparse
import gc
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from albatross import ops
from albatross.config import EngineConfig
from albatross.engine.model_runner import ModelRunner, resolve_device
from albatross.errors import ConfigError
from bench.bounds import StepCost, recurrence_bytes, step_cost
from bench.cuda import DTYPES, capture, copy_bandwidth, gemm_rate, time_each
from bench.models import model_config, model_setting
from bench.plot import prefill_plot
from bench.profile import Work, profile_steps
from bench.recurrence import KERNELS, MIXING_VECTORS, Rows
from bench.timing import Measured, Result, make_parser, summarise, time_on_host, write_report

MODELS = ("0.1b", "1.5b", "7.2b")
WHOLE_TOKENS = 4096
KERNEL_TOKENS, MAX_CALLS = 16_384, 16  # a graph of the recurrence has calls up to so many tokens or of so many
Step = Callable[[], object]


class Shape(NamedTuple):
    """So many prompts of equal length."""

    prompts: int
    length: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Raises ArgumentTypeError for what is not like 8x512."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"a shape is prompts x tokens of each, such as 8x512; found {text!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def num_tokens(self) -> int:
        return self.prompts * self.length

    def __str__(self) -> str:
        return f"{self.prompts}x{self.length}"


SWEEP = tuple(Shape(1, length) for length in (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768))
GRID = (Shape(8, 512), Shape(8, 2048), Shape(32, 128), Shape(64, 64), Shape(64, 512))
# On an H200 with fp16 weights and state: tokens/s of a model, microseconds of the recurrence by heads.
TARGETS = {
    "7.2b": {Shape(1, 4096): 42_000, Shape(8, 512): 44_000},
    "1.5b": {Shape(1, 4096): 180_000, Shape(8, 2048): 200_000},
}
KERNEL_TARGETS = {64: {Shape(1, 4096): 350, Shape(8, 2048): 800}}


class Rates(NamedTuple):
    """What a card does at most: bytes copied and floating-point operations of products a second."""

    bandwidth: float
    gemms: float


class Machine(NamedTuple):
    """Where things are measured, how often, and beside which rates."""

    device: torch.device
    repeats: int
    rates: Rates | None

    def prepare(self, calls: Sequence[Step]) -> Step:
        """One step of all `calls`."""
        if self.device.type == "cuda":
            return capture(calls).replay
        return lambda: [call() for call in calls]

    def time(self, step: Step) -> Measured:
        """Seconds of a step."""
        return summarise((time_each if self.device.type == "cuda" else time_on_host)(step, self.repeats))


class PromptReader:
    """Reads prompts of equal length piece by piece; each reading goes on from the states that the one before left."""

    def __init__(self, runner: ModelRunner, tokens: Tensor, piece: int) -> None:
        """tokens: [B, T] int64; the prompts have the runner's first slots. piece: tokens of each that a forward pass takes."""
        self._model, self._pool = runner.model, runner.pool
        self.shape = Shape(*tokens.shape)
        self._slots = torch.arange(len(tokens), dtype=torch.int32, device=runner.device)
        places = torch.arange(len(tokens) + 1, dtype=torch.int32, device=runner.device)
        self._pieces = [(part.flatten(), part.shape[1] * places) for part in tokens.split(piece, dim=1)]
        self._no_logits = self._slots[:0].long()
        self._last = self._pieces[-1][1][1:].long() - 1

    @torch.inference_mode()
    def read(self) -> Tensor:
        """Returns the logits of the last tokens, [B, V]."""
        for tokens, bounds in self._pieces[:-1]:
            self._model.forward(tokens, bounds, self._slots, self._no_logits, self._pool, is_decode=False)
        tokens, bounds = self._pieces[-1]
        return self._model.forward(tokens, bounds, self._slots, self._last, self._pool, is_decode=False)

    @property
    def cost(self) -> StepCost:
        """What a reading must do at least, in however many pieces."""
        model, (prompts, _) = self._model, self.shape
        return step_cost(model.config, prompts, self._pool.slot_bytes, model.dtype.itemsize, self.shape.num_tokens)

    @property
    def recurrence_bytes(self) -> int:
        """What the recurrence, and time mixing around it, move in all layers and pieces."""
        prompts, config = self.shape.prompts, self._model.config
        sizes = config.num_heads, self._model.state_dtype.itemsize, self._model.dtype.itemsize, MIXING_VECTORS
        pieces = [recurrence_bytes(prompts, len(tokens), *sizes) for tokens, _ in self._pieces]
        return config.num_layers * sum(pieces)


def piece_length(shape: Shape, token_budget: int) -> int:
    """Tokens of each prompt in one forward pass."""
    return shape.length if shape.num_tokens <= WHOLE_TOKENS else max(1, token_budget // shape.prompts)


def measure_kernel(name: str, num_heads: int, shape: Shape, state: str, machine: Machine) -> Result:
    """One layer, states in and out."""
    kernel, device = KERNELS[name], machine.device
    pool = torch.zeros(shape.prompts, num_heads, 64, 64, dtype=DTYPES[state], device=device)
    slots = torch.arange(shape.prompts, dtype=torch.int32, device=device)
    bounds = shape.length * torch.arange(shape.prompts + 1, dtype=torch.int32, device=device)
    num_calls = max(1, min(MAX_CALLS, KERNEL_TOKENS // shape.num_tokens))
    step = machine.prepare([kernel.prepare(Rows(pool, bounds, slots, shape.num_tokens))] * num_calls)
    seconds = machine.time(step)
    us, us_low, us_high = (1e6 * value / num_calls for value in (seconds.median, seconds.low, seconds.high))
    num_bytes = recurrence_bytes(shape.prompts, shape.num_tokens, num_heads, pool.itemsize, num_vectors=kernel.num_vectors)
    details = {
        "recurrence": name, "heads": num_heads, "prompts": shape.prompts, "length": shape.length, "state": state,
        "us_low": us_low, "us_high": us_high, "bytes": num_bytes, "gb_s": num_bytes / us / 1e3,
    }  # fmt: skip
    title = f"{name}, {num_heads} heads, {shape}, {state} state"
    if machine.rates is None:
        return Result(title, us, "us", details=details)
    target = KERNEL_TARGETS.get(num_heads, {}).get(shape) if state == "fp16" else None
    return Result(title, us, "us", num_bytes / machine.rates.bandwidth * 1e6, details, target)


def measure_model(model: str, reader: PromptReader, machine: Machine, args: argparse.Namespace) -> list[Result]:
    """The figure of one shape; with --profile those of its kernels too."""
    shape, cost, rates = reader.shape, reader.cost, machine.rates
    step = machine.prepare([reader.read])
    seconds = machine.time(step)
    title = f"prefill {model}, {shape}, {args.state_dtype} state"
    tokens_per_s = shape.num_tokens / seconds.median
    details = {
        "model": model, "prompts": shape.prompts, "length": shape.length, "state_dtype": args.state_dtype,
        "ms": seconds.median * 1e3, "ms_low": seconds.low * 1e3, "ms_high": seconds.high * 1e3,
        "flops": cost.flops, "tflop_s": cost.flops / seconds.median / 1e12,
    }  # fmt: skip
    if rates is None:
        return [Result(title, tokens_per_s, "tokens/s", details=details)]
    floor = cost.seconds(*rates)
    gemm_ms = cost.flops / rates.gemms * 1e3
    details |= {
        "floor_ms": floor * 1e3, "limit": cost.limit(*rates), "gemm_ms": gemm_ms, "of_gemms": gemm_ms / details["ms"]
    }  # fmt: skip
    target = TARGETS.get(model, {}).get(shape) if args.state_dtype == "float16" else None
    results = [Result(title, tokens_per_s, "tokens/s", shape.num_tokens / floor, details, target)]
    if args.profile is not None and shape in (args.profile or args.shapes):
        known = {
            "products": Work(cost.flops, rates.gemms, "TFLOP/s"),
            "recurrence": Work(reader.recurrence_bytes, rates.bandwidth, "GB/s"),
        }
        results += profile_steps(title, step, known)
    return results


def measure_shapes(model: str, machine: Machine, args: argparse.Namespace) -> list[Result]:
    config = EngineConfig(
        model=model_setting(model), device=args.device, state_dtype=args.state_dtype, cuda_graphs=False,
        max_num_seqs=max(shape.prompts for shape in args.shapes),
    )  # fmt: skip
    runner = ModelRunner(config)
    budget = config.token_budget(runner.device.type)
    results = []
    for shape in args.shapes:
        tokens = torch.randint(1, runner.vocab_size, shape, device=runner.device)
        results += measure_model(model, PromptReader(runner, tokens, piece_length(shape, budget)), machine, args)
    return results


def measure(args: argparse.Namespace) -> list[Result]:
    """All figures. Raises ConfigError for a profile without a card."""
    device = torch.device(resolve_device(args.device))
    if device.type != "cuda" and args.profile is not None:
        raise ConfigError("--profile reads the records of a CUDA card, but the device is the CPU; leave it out.")
    results, rates = [], None
    if device.type == "cuda":
        ops.load_native(device)
        rates = Rates(copy_bandwidth(), gemm_rate())
        results += [Result("copy", rates.bandwidth / 1e9, "GB/s"), Result("GEMM", rates.gemms / 1e12, "TFLOP/s")]
    machine = Machine(device, args.repeats, rates)
    if "kernel" in args.parts:
        for num_heads in dict.fromkeys(model_config(model).num_heads for model in args.models):
            results += [
                measure_kernel(name, num_heads, shape, state, machine)
                for name in KERNELS for state in DTYPES for shape in args.shapes
            ]  # fmt: skip
    for model in args.models if "model" in args.parts else ():
        results += measure_shapes(model, machine, args)
        gc.collect()  # graphs, model and pool refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="sizes of random models, 'demo', or checkpoints")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=[*SWEEP, *GRID], help="prompts x tokens of each")
    parser.add_argument("--parts", nargs="+", choices=("kernel", "model"), default=["kernel", "model"])
    parser.add_argument("--state-dtype", choices=("float16", "float32"), default="float16", help="of the model's states")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=10, help="readings that are timed of each shape")
    parser.add_argument(
        "--profile", type=Shape.parse, nargs="*", help="what each kernel takes, too: of these shapes, or of all"
    )
    parser.add_argument("--plot", type=Path, help="write time against tokens of one prompt to this SVG file")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    results = measure(args)
    write_report(results, args.out)
    if args.plot:
        args.plot.write_text(prefill_plot([result.details for result in results]))


if __name__ == "__main__":
    main()
