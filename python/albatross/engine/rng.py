"""Random numbers that depend on nothing but (seed, choice, position): Philox4x32-10, a counter-based generator.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The same request draws the
same numbers alone or in any batch, in any slot, on any device.
"""

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox(key: Words, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for each 64-bit key and 128-bit counter (four columns of 32-bit words held in uint64)."""
    k0, k1 = key & _LOW, key >> _SHIFT
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Words, choices: Words, positions: Words) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each (seed, choice, position), all uint64 of the same shape."""
    zero = np.zeros_like(positions)
    word = philox(seeds, (positions & _LOW, positions >> _SHIFT, choices & _LOW, zero))[0]
    return (word.astype(np.float64) + 0.5) * 2.0**-32
