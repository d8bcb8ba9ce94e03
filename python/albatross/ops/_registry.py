"""Enters ops into torch's registry: schema, fake and CPU implementation. So an op exists, once, on any machine, and the native
library (`csrc/bindings.cpp`) only adds its CUDA implementation.

Knows no op. The modules of the ops call it, each for its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from albatross.ops._loader import load_native

Tensors = dict[str, Tensor]  # an op's tensors by name; those not given are left out
_library = library.Library("albatross", "FRAGMENT")


def register(
    op: str, arguments: str, check_arguments: Callable[[str, dict[str, Any]], None], meaning: Callable[..., None]
) -> None:
    """arguments: of the schema. The fake calls `check_arguments(op, arguments)`, which raises RuntimeError; so does the CPU
    implementation, which then calls `meaning` with the arguments as they came."""
    _library.define(f"{op}({arguments}) -> ()")
    names = [argument.name for argument in getattr(torch.ops.albatross, op).default._schema.arguments]

    def fake(*args: Any) -> None:
        check_arguments(op, {name: x for name, x in zip(names, args, strict=True) if x is not None})

    def implementation(*args: Any) -> None:
        fake(*args)
        meaning(*args)

    library.register_fake(f"albatross::{op}", fake, lib=_library)
    _library.impl(op, implementation, "CPU")


def need_library(x: Tensor) -> None:
    """Opens the native library if x is on a CUDA card. Raises NativeLibraryError where there is none to use."""
    if x.is_cuda:
        load_native(x.device)
