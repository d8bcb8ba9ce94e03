"""Plain torch: the meaning of each op, and of the whole model. The oracle of the tests, and the backend of CPUs.

What is named here has the names and arguments of `albatross.ops`.
"""

from albatross.reference.sampling import sample
from albatross.reference.tmix import add_norm, add_norm_mix, squared_relu, tmix_decode, tmix_prefill, tmix_prepare, tmix_readout
from albatross.reference.wkv7 import wkv7_prefill

__all__ = [
    "add_norm",
    "add_norm_mix",
    "sample",
    "squared_relu",
    "tmix_decode",
    "tmix_prefill",
    "tmix_prepare",
    "tmix_readout",
    "wkv7_prefill",
]
