"""Opens the installed wheel's library as the package itself does, and asks for answers that are known. Prints a report as JSON.

`verify_wheel.py` runs it in an environment that has one torch and the wheel, and nothing else. Without a card the library is
chosen as if there were one of each architecture it holds code for, and its own code then runs as far as its refusal of a
CPU tensor; with a card the kernel runs too.
"""

import json
import math
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from albatross import ops  # registers the schemas and the CPU implementations
from albatross.constants import DECAY_SCALE, HEAD_SIZE
from albatross.ops import _loader
from albatross.ops._driver import Card
from albatross.ops._manifest import PACKAGE, Build
from albatross.ops._selection import Context

TOKENS, HEADS = 3, 2
NAMES = ("r", "w", "k", "v", "a", "b")
TOLERANCE = 1e-5  # of the largest answer: float32 sums of 64 terms, in another order
Vector = list[float]


def inputs() -> dict[str, list[list[Vector]]]:
    """[T, H, 64] each, in steps of 1/64, so that every type holds them as they are."""
    return {
        name: [
            [[((37 * i + 11 * head + 53 * t + 29 * number) % 31 - 15) / 64 for i in range(HEAD_SIZE)] for head in range(HEADS)]
            for t in range(TOKENS)
        ]
        for number, name in enumerate(NAMES)
    }


def answer(x: dict[str, list[list[Vector]]]) -> list[list[Vector]]:
    """y [T, H, 64] by the law S = S diag(d) + (S a) b^T + v k^T, y = S r, in plain Python."""
    y: list[list[Vector]] = [[[] for _ in range(HEADS)] for _ in range(TOKENS)]
    for head in range(HEADS):
        s = [[0.0] * HEAD_SIZE for _ in range(HEAD_SIZE)]
        for t in range(TOKENS):
            r, w, k, v, a, b = (x[name][t][head] for name in NAMES)
            decay = [math.exp(-DECAY_SCALE / (1 + math.exp(-logit))) for logit in w]
            for i, row in enumerate(s):
                removed = sum(map(float.__mul__, row, a))
                s[i] = [row[j] * decay[j] + removed * b[j] + v[i] * k[j] for j in range(HEAD_SIZE)]
            y[t][head] = [sum(map(float.__mul__, row, r)) for row in s]
    return y


def call(device: str) -> Tensor:
    """What the registered op answers on this device."""
    vectors = [torch.tensor(x, device=device) for x in inputs().values()]
    y = torch.full_like(vectors[0], math.nan)
    state = torch.zeros(1, HEADS, HEAD_SIZE, HEAD_SIZE, device=device)
    ends, slots = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, TOKENS], [0]))
    torch.ops.albatross.wkv7_prefill(state, *vectors, ends, slots, y)
    return y.cpu()


def answer_problems(device: str) -> list[str]:
    expected = torch.tensor(answer(inputs()))
    difference = float((call(device) - expected).abs().max() / expected.abs().max())
    if difference <= TOLERANCE:  # false for NaN
        return []
    return [f"wkv7_prefill on {device} is off by {difference:.1e} of the largest known answer, expected {TOLERANCE:.0e} at most."]


def pretended(context: Context, build: Build) -> Context:
    """The machine as it would be with a card for each of the library's architectures and the oldest driver that serves it."""
    major, minor = map(int, build.cuda_toolkit.split(".")[:2])
    capabilities = [divmod(int("".join(filter(str.isdigit, target))), 10) for target in build.arch or build.ptx]
    cards = tuple(Card(i, "pretended", capability) for i, capability in enumerate(capabilities))
    return replace(context, torch_cuda=context.torch_cuda or build.cuda_toolkit, driver_cuda=(major, minor), cards=cards)


def open_library() -> tuple[list[str], bool]:
    """Choose and open the library as `load_native` does. Returns what is wrong, and whether there is a card to run it on."""
    context = _loader.current_context()
    context = _loader.current_context()
    (candidate,) = (candidate for candidate in _loader.find_candidates(context) if candidate.origin == PACKAGE)
    if candidate.build is None:
        return [str(candidate.problem)], False
    has_card = bool(context.cards) and torch.cuda.is_available()
    if has_card:
        ops.load_native("cuda:0")
        return [], True
    decision = _loader.decide(pretended(context, candidate.build))
    if decision.chosen is None:
        return [str(decision.error())], False
    _loader.open_library(decision.chosen)
    return [], False


def op_problems(names: list[str]) -> list[str]:
    """Ops of the build record that have no schema here, or no CUDA implementation once the library is open."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [f"{name} has no schema." for name in names if not hasattr(torch.ops.albatross, name)] + [
        f"{name} has no CUDA implementation." for name in names if not has_kernel(f"albatross::{name}", "CUDA")
    ]


def refusal_problems() -> list[str]:
    """The library's own code runs without a card too: it must refuse a CPU tensor, by an exception that crosses into torch."""
    vectors = [torch.zeros(TOKENS, HEADS, HEAD_SIZE) for _ in range(7)]
    state = torch.zeros(1, HEADS, HEAD_SIZE, HEAD_SIZE)
    ends, slots = torch.tensor([0, TOKENS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    try:
        torch.ops.albatross.wkv7_prefill.default.redispatch(key, state, *vectors[:6], ends, slots, vectors[6])
    except RuntimeError as error:
        is_ours = str(error).startswith("wkv7_prefill: state must be")
        return [] if is_ours else [f"The library refused a CPU tensor with: {error}."]
    return ["The library's wkv7_prefill took a CPU tensor without a word."]


def main() -> int:
    names: list[str] = json.loads(sys.argv[1])
    problems = answer_problems("cpu")
    opening, has_card = open_library()
    problems += opening
    if not opening:
        problems += [*op_problems(names), *refusal_problems(), *answer_problems("cpu")]
        problems += answer_problems("cuda:0") if has_card else []
    found = {name: getattr(torch.ops.albatross, name).default for name in names if hasattr(torch.ops.albatross, name)}
    report: dict[str, Any] = {
        "torch": str(torch.__version__),
        "python": f"cp{sys.version_info[0]}{sys.version_info[1]}",
        "machine": torch.cuda.get_device_name(0) if has_card else "cpu",
        "arch": "sm_{}{}".format(*torch.cuda.get_device_capability(0)) if has_card else None,
        "level": "run" if has_card else "loaded",
        "ops": {name: str(op._schema) for name, op in found.items()},
        "problems": problems,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
