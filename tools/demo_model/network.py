"""RWKV-7 (x070) with a backward pass, at the sizes of the demo model. State dicts have the official names. For `train`."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.cpp_extension import load

NUM_LAYERS, WIDTH, HEAD_SIZE, VOCAB_SIZE = 8, 256, 64, 4096
W_RANK, A_RANK, V_RANK, G_RANK = 32, 32, 32, 64
CHECKPOINT_TOKENS = 16  # the kernel keeps every 16th state for the backward pass; row lengths are multiples of it


def build_kernel() -> None:
    """Compiles the recurrence for the card at hand; must run before a model does."""
    source = Path(__file__).with_name("wkv7_train.cu")
    WKV7.kernel = load(name="wkv7_train", sources=[str(source)], extra_cuda_cflags=["-O3", "--use_fast_math"])


class WKV7(torch.autograd.Function):
    """The recurrence over r w k v a b [B, T, H, 64] float32, w being the decay itself, from a zero state."""

    kernel: ModuleType

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        r = inputs[0]
        batch, length, heads, _ = r.shape
        y, sa = torch.empty_like(r), torch.empty_like(r)
        states = r.new_empty(batch, heads, length // CHECKPOINT_TOKENS, HEAD_SIZE, HEAD_SIZE)
        WKV7.kernel.forward(*inputs, y, states, sa)
        ctx.save_for_backward(*inputs, states, sa)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        *inputs, states, sa = ctx.saved_tensors
        gradients = tuple(torch.empty_like(tensor) for tensor in inputs)
        WKV7.kernel.backward(*inputs, dy.contiguous(), states, sa, *gradients)
        return gradients


class TimeMix(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self._add_mixes(layer)
        self._add_loras(layer)
        linear = torch.arange(WIDTH) / (WIDTH - 1) - 0.5
        self.k_k = _vector(0.71 - linear * 0.1)
        self.k_a = _vector(torch.full((WIDTH,), 1.02))
        self.r_k = nn.Parameter(torch.full((WIDTH // HEAD_SIZE, HEAD_SIZE), -0.04))
        self.receptance, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for module, scale in ((self.receptance, 0.5), (self.key, 0.05), (self.value, 0.5)):
            module.weight.data.uniform_(-scale / WIDTH**0.5, scale / WIDTH**0.5)
        self.output.weight.data.zero_()
        self.ln_x = nn.GroupNorm(WIDTH // HEAD_SIZE, WIDTH, eps=64e-5)
        self.ln_x.weight.data.fill_(((1 + layer) / NUM_LAYERS) ** 0.7)

    def _add_mixes(self, layer: int) -> None:
        depth, channel = 1 - layer / NUM_LAYERS, torch.arange(WIDTH) / WIDTH
        for name, exponent in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            self.register_parameter(f"x_{name}", _vector(1 - channel ** (exponent * depth)))

    def _add_loras(self, layer: int) -> None:
        linear = torch.arange(WIDTH) / (WIDTH - 1) - 0.5
        zigzag = ((torch.arange(WIDTH) % HEAD_SIZE) - (HEAD_SIZE - 1) / 2) / ((HEAD_SIZE - 1) / 2)
        zigzag = zigzag * zigzag.abs()
        decay = -6 + 6 * (torch.arange(WIDTH) / (WIDTH - 1)) ** (1 + (layer / (NUM_LAYERS - 1)) ** 0.3)
        self.w0, self.w1, self.w2 = _vector(decay + 0.5 + zigzag * 2.5), _zeros(WIDTH, W_RANK), _orthogonal(W_RANK, WIDTH)
        self.a0, self.a1, self.a2 = (
            _vector(-0.19 + zigzag * 0.3 + linear * 0.4),
            _zeros(WIDTH, A_RANK),
            _orthogonal(A_RANK, WIDTH),
        )
        self.v0, self.v1, self.v2 = _vector(0.73 - linear * 0.4), _zeros(WIDTH, V_RANK), _orthogonal(V_RANK, WIDTH)
        self.g1, self.g2 = _zeros(WIDTH, G_RANK), _orthogonal(G_RANK, WIDTH)

    def forward(self, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        delta = _previous(x) - x
        xr, xw, xk, xv, xa, xg = (x + delta * self.get_parameter(f"x_{name}") for name in "rwkvag")
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        log_decay = -F.softplus(-(self.w0 + (torch.tanh(xw @ self.w1) @ self.w2).float())) - 0.5
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + (xv @ self.v1) @ self.v2)
        a = torch.sigmoid(self.a0 + (xa @ self.a1) @ self.a2)
        g = torch.sigmoid(xg @ self.g1) @ self.g2
        kk = F.normalize((k * self.k_k).float().view(batch, length, -1, HEAD_SIZE), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, k, v_heads, a, log_decay = (_heads(tensor) for tensor in (r, k, v, a, log_decay))
        y: Tensor = _wkv7(r, torch.exp(-torch.exp(log_decay)), k, v_heads, -kk.contiguous(), (kk * a).contiguous())
        y = self.ln_x(y.view(batch * length, WIDTH)).view(batch, length, WIDTH)
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v_heads).view(batch, length, WIDTH)
        return self.output(y * g), v_first


class ChannelMix(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.x_k = _vector(1 - (torch.arange(WIDTH) / WIDTH) ** ((1 - layer / NUM_LAYERS) ** 4))
        self.key = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.value = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.key.weight.data.uniform_(-0.5 / WIDTH**0.5, 0.5 / WIDTH**0.5)
        self.value.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(torch.relu(self.key(x + (_previous(x) - x) * self.x_k)) ** 2)
        return out


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(WIDTH)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.att, self.ffn = TimeMix(layer), ChannelMix(layer)

    def forward(self, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        if v_first is None:
            x = self.ln0(x)
        y, v_first = self.att(self.ln1(x), v_first)
        x = x + y
        return x + self.ffn(self.ln2(x)), v_first


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(NUM_LAYERS))
        self.ln_out = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.emb.weight.data.uniform_(-1e-4, 1e-4)
        nn.init.orthogonal_(self.head.weight, gain=0.5)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of token_ids [B, T]."""
        x, v_first = self.emb(token_ids), None
        for block in self.blocks:
            x, v_first = block(x, v_first)
        logits: Tensor = self.head(self.ln_out(x))
        return logits


_wkv7: Callable[..., Tensor] = WKV7.apply


def _vector(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.view(1, 1, WIDTH))


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


def _orthogonal(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(nn.init.orthogonal_(torch.zeros(rows, columns), gain=0.1 * math.sqrt(max(1, rows / columns))))


def _previous(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


def _heads(x: Tensor) -> Tensor:
    return x.float().view(*x.shape[:-1], -1, HEAD_SIZE).contiguous()
