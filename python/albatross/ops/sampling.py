"""Registry entry and typed wrapper of the sampling op: schema, argument checks, fake and CPU implementation.

The law is in `reference/sampling.py`. Knows slots and their tables, nothing of requests; `engine/sampler.py` calls the wrapper.
"""

from typing import Any

import torch
from torch import Tensor

from albatross.ops._checks import check, check_contiguous, size
from albatross.ops._registry import Tensors, need_library, register
from albatross.reference import sampling as reference
from albatross.reference.sampling import RECORD_WORDS, Field, Flag, SlotTables, num_words

__all__ = ["Field", "Flag", "SlotTables", "sample"]


def sample(
    logits: Tensor, slots: Tensor, tables: SlotTables, drawn: Tensor, is_bad: Tensor, *, allowed: Tensor | None = None
) -> None:
    """Draws one id a row by the parameters of the row's slot, and moves the slot on.

    logits: [K, V] float32, any stride(0), contiguous within a row; not changed. slots: [K] int32, no two alike unless negative;
    a negative slot is padding: nothing is read or written for that row. allowed: [K, W] int32, bit mask of ids a row may draw.
    drawn: [K] int64, mutated; 0 where the row is bad. is_bad: [K] bool, mutated: a logit was not finite, or no id was left.
    Of the tables, last_token becomes the id, the record's position one more, and counts of rows with penalties (but for bad
    ones) decay and count the id. Raises RuntimeError on a wrong argument, NativeLibraryError on CUDA without a usable library.
    """
    need_library(logits)
    torch.ops.albatross.sample(
        logits, slots, tables.records, tables.edit_ids, tables.edit_values, tables.forbidden, allowed,
        tables.counts, tables.last_token, drawn, is_bad,
    )  # fmt: skip


def _check_sample(op: str, tensors: Tensors) -> None:
    logits = tensors["logits"]
    is_good = logits.dim() == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0
    is_good = is_good and (logits.shape[1] == 1 or logits.stride(1) == 1)
    check(op, "logits", logits, is_good, "float32 [K, V], contiguous within a row")
    (num_rows, vocab_size), num_slots, num_edits = logits.shape, size(tensors["records"]), size(tensors["edit_ids"], 1)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...], str]] = {
        "slots": (torch.int32, (num_rows,), "[K]"),
        "records": (torch.int32, (num_slots, RECORD_WORDS), "[S, 16]"),
        "edit_ids": (torch.int32, (num_slots, num_edits), "[S, M]"),
        "edit_values": (torch.float32, (num_slots, num_edits), "[S, M]"),
        "forbidden": (torch.int32, (num_words(vocab_size),), "[W]"),
        "allowed": (torch.int32, (num_rows, num_words(vocab_size)), "[K, W]"),
        "counts": (torch.float32, (num_slots, vocab_size), "[S, V]"),
        "last_token": (torch.int64, (num_slots,), "[S]"),
        "drawn": (torch.int64, (num_rows,), "[K]"),
        "is_bad": (torch.bool, (num_rows,), "[K]"),
    }
    for name, (dtype, shape, letters) in expected.items():
        if name in tensors:
            check_contiguous(op, name, tensors[name], dtype, shape, letters, logits)


def _sample(*arguments: Any) -> None:
    logits, slots, records, edit_ids, edit_values, forbidden, allowed, counts, last_token, drawn, is_bad = arguments
    tables = SlotTables(records, edit_ids, edit_values, forbidden, last_token, counts)
    reference.sample(logits, slots, tables, drawn, is_bad, allowed=allowed)


register(
    "sample",
    "Tensor logits, Tensor slots, Tensor(a!) records, Tensor edit_ids, Tensor edit_values, Tensor forbidden, Tensor? allowed, "
    "Tensor(b!)? counts, Tensor(c!) last_token, Tensor(d!) drawn, Tensor(e!) is_bad",
    _check_sample,
    _sample,
)
