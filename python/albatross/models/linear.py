"""Matrix products of the forward pass: which kernel computes which. Knows shapes and types, nothing of layers or states.

In float16 on CUDA there are our kernels for few rows ("rows", which for the value matrix is the sparse one) and cuBLAS; for few
rows `tuning` remembers which is quicker for which product. Everywhere else torch multiplies.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from albatross import ops
from albatross.constants import CMIX_SCALE
from albatross.models.tuning import CHOICES, Shape, Tuning
from albatross.ops.linear import ROWS_LIMIT
from albatross.reference import squared_relu

Activation = Literal["none", "tanh", "sigmoid", "squared_relu"]

LOW_RANK_LIMIT = ROWS_LIMIT * 2  # most rows of low-rank products by our kernel, in parts
_BATCHED_ROWS = 128  # most rows whose low-rank products are one batch: padding costs less than launches for few rows
_MIN_FILL = 0.75  # least share of a batch for more rows that is no padding; it parts g, of a large rank, from v, w and a
_REPEATS = 4  # replays of one measurement


class Product(NamedTuple):
    """out = activation(x @ weight^T). x: [T, K] or [G, T, K]; weight: [N, K] or [G, N, K]; out: [T, N] or [G, T, N].

    Rows of x and out may lie any multiple of 8 numbers apart. Sums are in float32; out may be float32 too.
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    activation: Activation = "none"

    @property
    def num_rows(self) -> int:
        return self.x.shape[-2]

    @property
    def shape(self) -> Shape:
        """N (of all G together) and K, as `tuning` knows the product."""
        return self.weight.shape[:-1].numel(), self.weight.shape[-1]


class LowRank(NamedTuple):
    """Low-rank projections of n inputs: out[i] = activation[i](x[i] @ down[i]^T) @ up[i]^T.

    x: [n, T, C]; down: [n, R, C]; hidden: [n, T, R], written on the way; up: [n, C, R]; out: [n, T, C]. Ranks below R, the
    largest, are padded with zeros in `down` and `up`: who multiplies past a rank writes finite numbers into `hidden` first,
    and `up` makes nothing of them. Ranks are multiples of 8, so that cuBLAS reads and writes slices of them where they lie.
    """

    x: Tensor
    down: Tensor
    hidden: Tensor
    up: Tensor
    out: Tensor
    ranks: Sequence[int]
    activations: Sequence[Activation]

    @property
    def downs(self) -> list[Product]:
        parts = zip(self.x, self.down, self.hidden, self.ranks, self.activations, strict=True)
        return [Product(x, down[:rank], hidden[:, :rank], name) for x, down, hidden, rank, name in parts]

    @property
    def ups(self) -> list[Product]:
        parts = zip(self.hidden, self.up, self.out, self.ranks, strict=True)
        return [Product(hidden[:, :rank], up[:, :rank], out) for hidden, up, out, rank in parts]

    @property
    def groups(self) -> list["LowRank"]:
        """The same projections by neighbours of like ranks, which one batched product computes with little padding."""
        return [self._take(own) for own in _like_ranks(self.ranks)]

    def _take(self, own: slice) -> "LowRank":
        ranks, activations = self.ranks[own], self.activations[own]
        rank = max(ranks)
        down, hidden, up = self.down[own, :rank], self.hidden[own, :, :rank], self.up[own, :, :rank]
        return LowRank(self.x[own], down, hidden, up, self.out[own], ranks, activations)


def _like_ranks(ranks: Sequence[int]) -> list[slice]:
    """Divides ranks into runs, each as long as padding all of it to its largest keeps _MIN_FILL."""
    starts = [0]
    for i in range(1, len(ranks)):
        run = ranks[starts[-1] : i + 1]
        if sum(run) < _MIN_FILL * len(run) * max(run):
            starts.append(i)
    return [slice(start, end) for start, end in pairwise([*starts, len(ranks)])]


class Linear:
    """All products by torch: on the CPU, in float32, and for the reference on CUDA."""

    def multiply(self, product: Product) -> None:
        _multiply_by_torch(product)

    def project(self, main: Product, low_rank: LowRank) -> None:
        """Computes both, which do not depend on each other."""
        _multiply_by_torch(main)
        _multiply_low_rank_by_torch(low_rank)

    def multiply_value(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [T, C] = hidden [T, F] @ weight [F, C], `hidden` being a squared ReLU; its scale in float16 is undone."""
        _multiply_value_by_torch(hidden, weight, out)


class NativeLinear(Linear):
    """The products of a float16 model on one CUDA card, by the kernels that `tuning` names. On the CPU, where tests run it, the
    ops' own CPU implementations stand in for the kernels."""

    def __init__(self, device: torch.device, tuning: Tuning) -> None:
        self._tuning = tuning
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def multiply(self, product: Product) -> None:
        _multiply(product, self._kernel(product.shape, product.num_rows))

    def project(self, main: Product, low_rank: LowRank) -> None:
        """As `Linear.project`: few rows of all products share a launch, for many the low-rank ones run beside the main one."""
        if main.num_rows <= ROWS_LIMIT:
            _launch([main, *low_rank.downs])
            _launch(low_rank.ups)
            return
        with self._beside():
            if main.num_rows <= LOW_RANK_LIMIT:
                _launch(_split_rows(low_rank.downs))
                _launch(_split_rows(low_rank.ups))
            else:
                _multiply_low_rank_by_torch(low_rank)
        _multiply(main, "cublas")
        self._join()

    def multiply_value(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        _multiply_value(hidden, weight, out, self._kernel((weight.shape[1], weight.shape[0]), len(hidden)))

    def _kernel(self, shape: Shape, num_rows: int) -> str:
        return "cublas" if num_rows > ROWS_LIMIT else self._tuning.lookup(*shape, num_rows)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched in here runs beside what follows, up to `_join`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def tune(self, rows: Iterable[int], products: Sequence[Sequence[Product]], values: Sequence[Product]) -> int:
        """Measures what is not known for these numbers of rows, and keeps it. Returns how many choices were made.

        products: for each kind of product, the same one with different weights, more than fit into the L2 cache, and with at
        least as many rows of x and out as the largest of `rows`; values: the same for `multiply_value`.
        """
        num_made = 0
        for num_rows in rows:
            for alike in products:
                calls = [partial(_multiply, _first_rows(product, num_rows)) for product in alike]
                num_made += self._choose(alike[0].shape, num_rows, calls)
            calls = [partial(_multiply_value, x[:num_rows], weight, out[:num_rows]) for x, weight, out, _ in values]
            num_made += self._choose((values[0].out.shape[-1], values[0].x.shape[-1]), num_rows, calls)
        if num_made:
            self._tuning.save()
        return num_made

    def _choose(self, shape: Shape, num_rows: int, calls: Sequence[Callable[[str], None]]) -> bool:
        if self._tuning.is_known(*shape, num_rows):
            return False
        self._tuning.measure(*shape, num_rows, CHOICES, _Timer(calls))
        return True


class _Timer:
    """Seconds of one call, from a graph that holds each of `calls` once, so that no launch shows."""

    def __init__(self, calls: Sequence[Callable[[str], None]]) -> None:
        self._calls = calls
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def __call__(self, kernel: str) -> float:
        if kernel not in self._graphs:
            self._graphs[kernel] = self._capture(kernel)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_REPEATS):
            self._graphs[kernel].replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / _REPEATS / len(self._calls)

    def _capture(self, kernel: str) -> torch.cuda.CUDAGraph:
        self._calls[0](kernel)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in self._calls:
                call(kernel)
        graph.replay()
        return graph


def _split_rows(products: Sequence[Product]) -> list[Product]:
    """The same products, of as few rows each as our kernel takes; their weights are small enough to be read several times."""
    return [
        product._replace(x=x, out=out)
        for product in products
        for x, out in zip(product.x.split(ROWS_LIMIT), product.out.split(ROWS_LIMIT), strict=True)
    ]


def _first_rows(product: Product, num_rows: int) -> Product:
    return product._replace(x=product.x[..., :num_rows, :], out=product.out[..., :num_rows, :])


def _multiply(product: Product, kernel: str) -> None:
    if kernel == "rows":
        _launch([product])
        return
    x, weight, out, activation = product
    if out.dtype != x.dtype and x.is_cuda:
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
    elif out.dtype != x.dtype:
        out.copy_(x.to(out.dtype) @ weight.T.to(out.dtype))
    else:
        (torch.mm if x.dim() == 2 else torch.bmm)(x, weight.mT, out=out)
    if activation == "squared_relu":
        ops.squared_relu(out)
    elif activation != "none":
        raise ValueError(f"cuBLAS is not used for products with {activation}; it is for low-rank ones, which share a launch.")


def _multiply_value(hidden: Tensor, weight: Tensor, out: Tensor, kernel: str) -> None:
    if kernel == "rows":
        ops.sparse_linear(hidden, weight, CMIX_SCALE**-2, out)
    else:
        _multiply_value_by_torch(hidden, weight, out)


def _launch(products: Sequence[Product]) -> None:
    """One launch of our own for products that do not depend on each other."""
    flat = [part for product in products for part in _ungroup(product)]
    x, weight, out, activation = zip(*flat, strict=True)
    ops.grouped_linear(x, weight, activation, out)


def _ungroup(product: Product) -> list[Product]:
    if product.x.dim() == 2:
        return [product]
    parts = zip(product.x.unbind(), product.weight.unbind(), product.out.unbind(), strict=True)
    return [Product(x, weight, out, product.activation) for x, weight, out in parts]


def _multiply_by_torch(product: Product) -> None:
    x, weight, out, activation = product
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    result = multiply(x, weight.mT, out=out if out.dtype == x.dtype else None)
    if activation == "tanh":
        result.tanh_()
    elif activation == "sigmoid":
        result.sigmoid_()
    elif activation == "squared_relu":
        squared_relu(result)
    if result is not out:
        out.copy_(result)


def _multiply_low_rank_by_torch(low_rank: LowRank) -> None:
    """One batched product a stage, as if all ranks were the largest; for many rows one for each of the groups.

    torch writes into the slices of `hidden` that are a group's without a copy: each row is in one piece, rows R apart.
    """
    groups = low_rank.groups if low_rank.x.shape[1] > _BATCHED_ROWS else [low_rank]
    for x, down, hidden, up, out, ranks, activations in groups:
        torch.bmm(x, down.mT, out=hidden)
        for part, rank, name in zip(hidden, ranks, activations, strict=True):
            if name == "tanh":
                part[:, :rank].tanh_()
            elif name == "sigmoid":
                part[:, :rank].sigmoid_()
        torch.bmm(hidden, up.mT, out=out)


def _multiply_value_by_torch(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    scale = CMIX_SCALE**-2 if hidden.dtype == torch.float16 else 1.0
    torch.addmm(out, hidden, weight, beta=0, alpha=scale, out=out)
