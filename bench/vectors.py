"""Random inputs of the recurrence and of time mixing, for measurements of time and errors. Knows no kernel and no model."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

PRODUCTS = ("r", "k", "v", "w", "a", "v_gate", "g", "v_first")
CONSTANTS = ("w0", "a0", "v0", "k_k", "k_a")
Vectors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_vectors(
    num_tokens: int, num_heads: int, device: torch.device, decay_logit: float = 0.0, generator: torch.Generator | None = None
) -> Vectors:
    """r, w, k, v, a, b [T, H, 64] in fp16, of the sizes at which a state stays bounded. decay_logit: the mean of w."""
    shape = (6, num_tokens, num_heads, 64)
    r, w, k, v, kk, gate = torch.randn(shape, generator=generator, device=device)
    kk = normalize(kk, dim=-1)
    return r.half(), (w + decay_logit).half(), (0.3 * k).half(), v.half(), -kk.half(), (kk * gate.sigmoid()).half()


def random_products(num_tokens: int, num_heads: int, device: torch.device) -> dict[str, Tensor]:
    """What `tmix_prefill` takes from r to ln_bias, in its order: products [T, C] in fp16, constants in fp32."""
    width = num_heads * 64
    products = {name: torch.randn(num_tokens, width, device=device).half() for name in PRODUCTS}
    constants = {name: torch.randn(width, device=device) for name in CONSTANTS}
    r_k, weight, bias = 0.3 * torch.randn(num_heads, 64, device=device), *torch.randn(2, width, device=device)
    return {**products, **constants, "r_k": r_k, "ln_weight": weight, "ln_bias": bias}
