"""Refusals of wrong arguments, in the words csrc/checks.h uses for CUDA tensors: op, argument, expected and found.

Knows shapes and types, no op. The fakes of the ops call them, and so do the CPU implementations. Alignment is checked in
C++ alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from albatross.constants import HEAD_SIZE

FLOATS = (torch.float16, torch.float32)


def describe(x: Tensor) -> str:
    return f"{name_of(x.dtype)} {list(x.shape)} with strides {list(x.stride())} on {x.device}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(op: str, name: str, x: Tensor, is_good: bool, expected: str) -> None:
    """Raises RuntimeError unless `is_good`."""
    torch._check(is_good, lambda: f"{op}: {name} must be {expected}, found {describe(x)}")


def size(x: Tensor, dim: int = 0) -> int:
    """x.shape[dim], or 0 where x has no such dimension; the checks refuse that shape then."""
    return x.shape[dim] if x.dim() > dim else 0


def check_contiguous(op: str, name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], letters: str, like: Tensor) -> None:
    """A contiguous tensor of one type and shape on the device of `like`; `letters` names the shape's sizes."""
    is_good = x.shape == torch.Size(shape) and x.dtype == dtype and x.is_contiguous() and x.device == like.device
    check(op, name, x, is_good, f"contiguous {name_of(dtype)} {letters} = {[*shape]} on {like.device}")


def check_leading_rows(op: str, name: str, x: Tensor) -> None:
    """The first tensor of an op that has rows: [T, C] of either type, C a multiple of the head size."""
    is_good = x.dtype in FLOATS and x.dim() == 2 and x.shape[1] % HEAD_SIZE == 0
    check(op, name, x, is_good, "float16 or float32 [T, C] with C a multiple of 64")


def check_rows(op: str, name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], letters: str, like: Tensor) -> None:
    """Rows on the device of `like`, each contiguous, any multiple of 8 numbers apart."""
    is_good = x.shape == torch.Size(shape) and x.dtype == dtype and x.device == like.device
    is_good = is_good and x.stride(1) == 1 and (x.shape[0] <= 1 or x.stride(0) % 8 == 0)
    expected = f"{name_of(dtype)} {letters} = {[*shape]} on {like.device}, rows a multiple of 8 numbers apart"
    check(op, name, x, is_good, expected)


def check_state(op: str, state: Tensor) -> None:
    """A pool of wkv states, [S, H, 64 value, 64 key], any distance from slot to slot."""
    is_shape = state.dim() == 4 and state.shape[2:] == (HEAD_SIZE, HEAD_SIZE)
    is_good = is_shape and state.dtype in FLOATS and state[:1].is_contiguous()
    check(op, "state", state, is_good, "float16 or float32 [S, H, 64, 64], contiguous within a slot")
