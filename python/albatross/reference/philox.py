"""Random numbers that are a function of what they are for, in plain Python. The native op has the same ones, bit for bit.

Knows nothing of logits or slots; `sampling` here draws by them.
"""

_WORD = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, a counter-based generator, on words of 32 bits.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def uniform(seed: tuple[int, int], choice: int, position: int) -> float:
    """A number in (0, 1) that depends on nothing but these: a request draws the same alone or in any batch, in any slot, on any
    device. seed: its low and its high word, of which 32 bits count."""
    return (philox((seed[0] & _WORD, seed[1] & _WORD), (position, 0, choice, 0))[0] + 0.5) * 2.0**-32
