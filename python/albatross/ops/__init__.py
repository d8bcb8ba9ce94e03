"""The public ops. Importing this package registers their schemas, fakes and CPU implementations; it opens no library.

`load_native` opens the native library by `_loader`'s choice and so adds the CUDA implementations; the wrappers call it on
the first CUDA tensor, an engine calls it at start so that a machine that cannot run says so before any allocation.
"""

from albatross.ops._loader import NativeLibrary, load_native
from albatross.ops.linear import grouped_linear, sparse_linear
from albatross.ops.sampling import SlotTables, sample
from albatross.ops.tmix import (
    add_norm,
    add_norm_mix,
    segment_room,
    squared_relu,
    tmix_decode,
    tmix_prefill,
    tmix_prepare,
    tmix_readout,
)
from albatross.ops.wkv7 import wkv7_prefill

__all__ = [
    "NativeLibrary",
    "SlotTables",
    "add_norm",
    "add_norm_mix",
    "grouped_linear",
    "load_native",
    "sample",
    "segment_room",
    "sparse_linear",
    "squared_relu",
    "tmix_decode",
    "tmix_prefill",
    "tmix_prepare",
    "tmix_readout",
    "wkv7_prefill",
]
