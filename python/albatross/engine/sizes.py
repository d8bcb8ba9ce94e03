"""Which sizes steps are padded to, in rows or tokens. Knows no torch; `graphs` captures these sizes, `pacing` counts in them."""

from bisect import bisect_left
from collections.abc import Sequence

_FINE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STRIDES = ((256, 32), (512, 64), (2048, 128), (1 << 30, 512))  # up to so many rows, a graph every so many
_LEAST_MIXED = 8  # tokens of the smallest step with prompts


def graph_sizes(max_size: int) -> list[int]:
    """Numbers of rows or tokens to capture, ascending; the last is `max_size` itself."""
    sizes = list(_FINE_SIZES)
    for limit, stride in _STRIDES:
        sizes += range(sizes[-1] + stride, min(limit, max_size) + 1, stride)
    return sorted({size for size in sizes if size < max_size} | {max_size})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Of steps with prompts, in tokens."""
    return [size for size in graph_sizes(max_tokens) if size >= min(_LEAST_MIXED, max_tokens)]


def padded_size(sizes: Sequence[int], number: int) -> int:
    """The smallest of ascending sizes that holds `number`, which is at most the last."""
    return sizes[bisect_left(sizes, number)]
