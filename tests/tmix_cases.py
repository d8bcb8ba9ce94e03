"""Inputs and the float64 oracle that the tests of the ops between the matrix products share. Written on its own, so that it can
disagree with `albatross.reference`; the recurrence is `wkv7_cases.oracle`.
"""

import itertools

import torch
from torch import Tensor
from wkv7_cases import oracle

Tensors = dict[str, Tensor | None]
GAP = 24  # numbers between the rows of strided inputs
PRODUCTS = ("r", "k", "v", "w", "a", "v_gate", "g", "v_first")
BIASES = ("w0", "a0", "v0", "k_k", "k_a")
DECODE = ("state", *PRODUCTS, *BIASES, "r_k", "ln_weight", "ln_bias", "slots", "out")
PREFILL = (*DECODE[:-2], "cu_seqlens", "slots", "out")
PREPARE = ("k", "v", "w", "a", "v_gate", "v_first", *BIASES)
OUTPUTS = ("w_out", "k_out", "v_out", "minus_kk", "b")
READOUT = ("r_k", "ln_weight", "ln_bias")


def bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def rows_of(lengths: list[int]) -> list[int]:
    """The row of each token."""
    return [row for row, length in enumerate(lengths) for _ in range(length)]


def strided(x: Tensor, gap: int = GAP) -> Tensor:
    """A copy of x [T, C] whose rows lie `gap` numbers apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def make_tmix(
    num_tokens: int, num_heads: int, dtype: torch.dtype, device: str = "cpu", *, is_gated: bool = True, seed: int = 0
) -> Tensors:
    """Everything `tmix_decode` takes but state, slots and out, of the sizes a trained model has, with strided rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = num_heads * 64
    products = {name: strided(normal(num_tokens, width).to(device, dtype)) for name in PRODUCTS}
    constants = {
        "w0": 3 * normal(width) - 2,
        "a0": normal(width),
        "v0": normal(width),
        "k_k": 0.85 + 0.1 * normal(width),
        "k_a": torch.rand(width, generator=generator),
        "r_k": 0.3 * normal(num_heads, 64),
        "ln_weight": 1 + 0.1 * normal(width),
        "ln_bias": 0.1 * normal(width),
    }
    tensors: Tensors = {**products, **{name: x.to(device) for name, x in constants.items()}}
    return tensors if is_gated else tensors | dict.fromkeys(("v_gate", "v_first", "v0"))


def doubles(tensors: Tensors) -> dict[str, Tensor]:
    """All that is given, in float64, with heads apart where there are rows."""
    given = {name: x.double().cpu() for name, x in tensors.items() if x is not None}
    return {name: x.unflatten(1, (-1, 64)) if x.dim() == 2 and name != "r_k" else x for name, x in given.items()}


def oracle_prepare(tensors: Tensors) -> dict[str, Tensor]:
    """w_out, k_out, v_out, minus_kk, b [T, H, 64] in float64."""
    t = doubles(tensors)
    num_heads = t["k"].shape[1]
    w0, a0, k_k, k_a = (t[name].view(num_heads, 64) for name in ("w0", "a0", "k_k", "k_a"))
    gate = 1 / (1 + torch.exp(-t["a"] - a0))
    kk = t["k"] * k_k
    kk = kk / kk.square().sum(-1, keepdim=True).sqrt()
    v = t["v"]
    if "v_gate" in t:
        share = 1 / (1 + torch.exp(-t["v_gate"] - t["v0"].view(num_heads, 64)))
        v = v * (1 - share) + t["v_first"] * share
    k = t["k"] * (1 - k_a + gate * k_a)
    return {"w_out": t["w"] + w0, "k_out": k, "v_out": v, "minus_kk": -kk, "b": kk * gate}


def oracle_readout(y: Tensor, k: Tensor, v: Tensor, tensors: Tensors) -> Tensor:
    """[T, C] in float64, of y, k and v [T, H, 64] in float64 and the r, g and constants among `tensors`."""
    t = doubles(tensors)
    centred = y - y.mean(-1, keepdim=True)
    normalised = centred / (centred.square().mean(-1, keepdim=True) + 64e-5).sqrt()
    normalised = normalised * t["ln_weight"].view(-1, 64) + t["ln_bias"].view(-1, 64)
    bonus = torch.einsum("thn,thn,hn->th", t["r"], k, t["r_k"])
    return ((normalised + bonus[..., None] * v) * t["g"]).flatten(1)


def oracle_decode(pool: Tensor, tensors: Tensors, slots: list[int]) -> tuple[Tensor, Tensor]:
    """What `tmix_decode` must leave behind in (state, out), in float64."""
    pool, out = oracle_prefill(pool, tensors, [1] * len(slots), slots)
    return pool, out.nan_to_num(0)


def oracle_prefill(pool: Tensor, tensors: Tensors, lengths: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
    """What `tmix_prefill` must leave behind in (state, out), in float64; NaN in out where it must write nothing."""
    pool = pool.double().cpu().clone()
    t, r = oracle_prepare(tensors), doubles(tensors)["r"]
    y = torch.full_like(r, torch.nan)
    for (begin, end), slot in zip(itertools.pairwise(bounds(lengths)), slots, strict=True):
        if slot >= 0 and end > begin:
            vectors = [x[begin:end] for x in (r, t["w_out"], t["k_out"], t["v_out"], t["minus_kk"], t["b"])]
            pool[slot], y[begin:end] = oracle(pool[slot], vectors)
    return pool, oracle_readout(y, t["k_out"], t["v_out"], tensors)


def make_norm(num_tokens: int, width: int, num_mixes: int, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> Tensors:
    """x, delta, ln_weight, ln_bias and mix of `add_norm_mix`; delta has strided rows."""
    generator = torch.Generator().manual_seed(seed)
    x, delta = 2 * torch.randn(2, num_tokens, width, generator=generator) + 0.3
    weight, bias = torch.randn(2, width, generator=generator)
    mix = torch.rand(num_mixes, width, generator=generator)
    return {
        "x": x.to(device),
        "delta": strided(delta.to(device, dtype)),
        "ln_weight": (1 + 0.1 * weight).to(device),
        "ln_bias": (0.1 * bias).to(device),
        "mix": mix.to(device, dtype),
    }


def make_shift(num_slots: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """One of the shift states of a slot-major pool."""
    pool = torch.randn(num_slots, 3, 2, width, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    return pool[:, 1, 0]


def oracle_norm(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """x + delta and its layer norm, [T, C] in float64."""
    x, weight, bias = (tensors[name].double().cpu() for name in ("x", "ln_weight", "ln_bias"))
    delta = tensors["delta"]
    if delta is not None:
        x = x + delta.double().cpu()
    centred = x - x.mean(-1, keepdim=True)
    return x, centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def oracle_norm_mix(tensors: Tensors, shift: Tensor, lengths: list[int], slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What `add_norm_mix` must leave behind in (x_out, shift, mixed), in float64; y is not rounded in between."""
    x, y = oracle_norm(tensors)
    shift, mix = shift.double().cpu().clone(), tensors["mix"].double().cpu()
    previous = torch.zeros_like(y)
    for (begin, end), slot in zip(itertools.pairwise(bounds(lengths)), slots, strict=True):
        if end > begin:
            previous[begin + 1 : end] = y[begin : end - 1]
        if end > begin and slot >= 0:
            previous[begin] = shift[slot]
            shift[slot] = y[end - 1]
    return x, shift, y * (1 - mix[:, None]) + previous * mix[:, None]


def oracle_squared_relu(x: Tensor) -> Tensor:
    y = x.double().cpu().clamp(min=0)
    return (y.clamp(max=2047) / 8).square() if x.dtype == torch.float16 else y.square()
