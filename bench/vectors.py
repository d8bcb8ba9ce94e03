"""Random inputs of the recurrence, for measurements of its time and its errors. Knows no kernel and no model."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

Vectors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_vectors(
    num_tokens: int, num_heads: int, device: torch.device, decay_logit: float = 0.0, generator: torch.Generator | None = None
) -> Vectors:
    """r, w, k, v, a, b [T, H, 64] in fp16, of the sizes at which a state stays bounded. decay_logit: the mean of w."""
    shape = (6, num_tokens, num_heads, 64)
    r, w, k, v, kk, gate = torch.randn(shape, generator=generator, device=device)
    kk = normalize(kk, dim=-1)
    return r.half(), (w + decay_logit).half(), (0.3 * k).half(), v.half(), -kk.half(), (kk * gate.sigmoid()).half()
