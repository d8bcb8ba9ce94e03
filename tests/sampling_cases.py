"""Rows, tables, the float64 oracle and the comparison with it that the tests of the sampling op share. The oracle is written on
its own, from the law as docs/api.md states it, so that it can disagree with `albatross.reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from albatross import ops
from albatross.ops.sampling import Field, Flag, SlotTables
from albatross.reference.philox import uniform

EDGE = 2e-6  # a draw this close to where the next id begins, as a part of all mass, may fall to either side in float32
SENTINEL = 77


@dataclass(frozen=True)
class Row:
    """What one slot is set to."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    decay: float = 1.0
    is_greedy: bool = False
    is_classic: bool = False
    seed: int = 1
    choice: int = 0
    position: int = 0
    min_tokens: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    stops: tuple[int, ...] = ()  # banned for the first min_tokens tokens
    counts: dict[int, float] = field(default_factory=dict)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence or self.frequency or self.repetition != 1)

    @property
    def has_limits(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def number(self) -> float:
        return uniform((self.seed & 0xFFFFFFFF, self.seed >> 32), self.choice, self.position)


KINDS = {
    "greedy": Row(is_greedy=True),
    "plain": Row(),
    "cold": Row(temperature=0.3),
    "hot": Row(temperature=2.0),
    "top_k": Row(top_k=20),
    "top_k beyond the tiles": Row(top_k=700),
    "top_p": Row(top_p=0.3),
    "wide top_p": Row(top_p=0.97, temperature=1.7),
    "min_p": Row(min_p=0.05),
    "all limits": Row(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
    "classic": Row(top_p=0.7, temperature=1.8, is_classic=True),
    "classic without limits": Row(temperature=0.6, is_classic=True),
    "presence": Row(presence=1.5, counts={3: 1.0, 40: 2.5}),
    "penalties": Row(presence=0.4, frequency=0.3, repetition=1.3, decay=0.9, top_p=0.8, counts={0: 3.0, 7: 0.5, 90: 1e-30}),
    "negative penalties": Row(frequency=-1.0, repetition=0.5, counts={5: 4.0, 6: 1.0}),
    "bias": Row(bias={2: 3.0, 64: -100.0, 99: 5.0}),
    "bans": Row(bias={0: -torch.inf, 1: -torch.inf, 50: -torch.inf}, temperature=1.5),
    "stops banned": Row(stops=(0, 9), min_tokens=4, position=3, bias={9: 4.0}),
    "stops free": Row(stops=(0, 9), min_tokens=4, position=4, bias={9: 4.0}),
    "seed of 64 bits": Row(seed=0xFEDCBA9876543210, choice=3, position=70_000),
}
KINDS = {name: replace(row, seed=row.seed + i) for i, (name, row) in enumerate(KINDS.items())}


WRONG_TABLES = (  # (name, how a wrong one is made, what the refusal says), where 3 slots of 40 ids are right
    ("records", lambda device: torch.zeros(3, 15, dtype=torch.int32, device=device),
     r"records must be contiguous int32 \[S, 16\] .* int32 \[3, 15\]"),
    ("edit_values", lambda device: torch.zeros(3, 9, device=device),
     r"edit_values must be contiguous float32 \[S, M\] .* found float32 \[3, 9\]"),
    ("forbidden", lambda device: torch.zeros(1, dtype=torch.int32, device=device),
     r"forbidden must be contiguous int32 \[W\] = \[2\] .* int32 \[1\]"),
    ("counts", lambda device: torch.zeros(3, 80, device=device)[:, ::2],
     r"counts must be contiguous float32 \[S, V\] = \[3, 40\] .* found float32 \[3, 40\] with strides \[80, 2\]"),
    ("last_token", lambda device: torch.zeros(3, dtype=torch.int32, device=device),
     "last_token must be contiguous int64 .* found int32"),
)  # fmt: skip


def int32(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def outputs(num_rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """drawn and is_bad, filled with what a draw must replace."""
    return torch.full((num_rows,), SENTINEL, device=device), torch.ones(num_rows, dtype=torch.bool, device=device)


def fit(row: Row, vocab_size: int) -> Row:
    """The row without the ids that a small vocabulary lacks."""
    return replace(
        row,
        bias={i: v for i, v in row.bias.items() if i < vocab_size},
        stops=tuple(i for i in row.stops if i < vocab_size),
        counts={i: v for i, v in row.counts.items() if i < vocab_size},
    )


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0, step: float = 0.0) -> Tensor:
    """Normal logits; with `step`, multiples of it, so that many ids are tied."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits / step).round() * step if step else logits


def bit_mask(ids: Sequence[int], vocab_size: int) -> Tensor:
    words = [0] * ((vocab_size + 31) // 32)
    for token_id in ids:
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor([word - (1 << 32) * (word >> 31) for word in words], dtype=torch.int32)


def make_tables(
    rows: Sequence[Row], slots: Sequence[int], vocab_size: int, forbidden: Sequence[int] = (), device: str = "cpu"
) -> SlotTables:
    """Tables of len(slots) + 2 slots, those of `slots` set to `rows`."""
    tables = SlotTables.allocate(len(slots) + 2, vocab_size, torch.device("cpu"))
    tables.counts = torch.zeros(len(slots) + 2, vocab_size)
    tables.forbidden = bit_mask(forbidden, vocab_size)
    for row, slot in zip(rows, slots, strict=True):
        entries = {**row.bias, **{i: row.bias.get(i, 0.0) for i in row.stops}}
        flags = Flag.GREEDY * row.is_greedy | Flag.CLASSIC * row.is_classic
        flags |= Flag.PENALTIES * row.has_penalties | Flag.LIMITS * row.has_limits
        record = tables.records[slot]
        record[: Field.TOP_K].view(torch.float32).copy_(
            torch.tensor([row.temperature, row.top_p, row.min_p, row.presence, row.frequency, row.repetition, row.decay])
        )
        words = (row.top_k, row.seed & 0xFFFFFFFF, row.seed >> 32, row.choice, row.position, row.min_tokens, len(entries), flags)
        record[Field.TOP_K : Field.FLAGS + 1] = torch.tensor(words).to(torch.int32)
        for place, (token_id, value) in enumerate(entries.items()):
            tables.edit_ids[slot, place] = token_id - 2**31 * (token_id in row.stops)
            tables.edit_values[slot, place] = value
        for token_id, count in row.counts.items():
            tables.counts[slot, token_id] = count
    columns = ("records", "edit_ids", "edit_values", "forbidden", "last_token", "counts")
    return replace(tables, **{name: getattr(tables, name).to(device) for name in columns})


def distribution(row: Row, logits: Tensor, forbidden: Sequence[int] = (), allowed: Sequence[int] | None = None) -> Tensor | None:
    """What the row draws from, [V] float64; None for a bad row."""
    if not bool(logits.isfinite().all()):
        return None
    x = logits.double().cpu().clone()
    for token_id, value in row.bias.items():
        x[token_id] += value
    if row.has_penalties:
        for token_id, count in row.counts.items():
            x[token_id] = x[token_id] / row.repetition if x[token_id] > 0 else x[token_id] * row.repetition
            x[token_id] -= row.presence + row.frequency * count
    banned = [*forbidden, *(row.stops if row.position < row.min_tokens else ())]
    x[torch.tensor(banned, dtype=torch.long)] = -torch.inf
    if allowed is not None:
        is_allowed = torch.zeros(len(x), dtype=torch.bool)
        is_allowed[torch.tensor(allowed, dtype=torch.long)] = True
        x[~is_allowed] = -torch.inf
    if not bool(x.max().isfinite()):
        return None
    if row.is_greedy:
        return torch.nn.functional.one_hot((x == x.max()).nonzero()[0, 0], len(x)).double()
    probs = torch.softmax(x if row.is_classic else x / row.temperature, dim=0)
    if row.has_limits:
        probs[x < lowest_that_stays(row, x, probs)] = 0
    if row.is_classic:
        probs = probs ** (1 / row.temperature)
    return probs / probs.sum()


def lowest_that_stays(row: Row, x: Tensor, probs: Tensor) -> Tensor:
    ranked, order = probs.sort(descending=True)
    ranked = ranked[: row.top_k or None]
    before = ranked.cumsum(0) - ranked
    stays = (before < torch.tensor(row.top_p).double() * ranked.sum()) & (ranked >= row.min_p * ranked[0])
    return x[order[max(int(stays.sum()), 1) - 1]]


def expected_id(row: Row, probs: Tensor) -> tuple[int, bool]:
    """The id that the row's number falls to, and whether it is so close to an edge that float32 may see it otherwise."""
    ends = probs.cumsum(0)
    place = row.number * ends[-1]
    token_id = int(torch.searchsorted(ends, place, right=True))
    is_edge = bool(((ends - place).abs() < EDGE).any()) and not row.is_greedy
    return token_id, is_edge


class Edges:
    """How many draws fell so close to where an id begins that they may go to either side, and how many were bound to."""

    def __init__(self) -> None:
        self.found = 0
        self._expected = 0.0

    def add(self, probs: Tensor, is_edge: bool) -> None:
        self.found += is_edge
        self._expected += probs.clamp(max=2 * EDGE).sum().item()  # the share of all numbers that lie within EDGE of an end

    @property
    def most(self) -> float:
        """Four standard deviations of a Poisson count above what is expected, and one for what is none."""
        return 1 + self._expected + 4 * self._expected**0.5


def assert_drawn_as_the_oracle_draws(
    rows: Sequence[Row], logits: Tensor, drawn: Tensor, is_bad: Tensor, forbidden: Sequence[int], edges: Edges
) -> None:
    for row, x, token_id, bad in zip(rows, logits, drawn.tolist(), is_bad.tolist(), strict=True):
        probs = distribution(row, x, forbidden)
        if probs is None:
            assert (bad, token_id) == (True, 0), row
            continue
        expected, is_edge = expected_id(row, probs)
        edges.add(probs, is_edge)
        assert not bad, row
        assert is_edge or token_id == expected, row


def assert_frequencies_follow_the_oracle(row: Row, number: int, vocab_size: int, device: str) -> None:
    """Draws `number` times in one call, as so many choices of one seed, and holds the counts against the oracle by chi square."""
    logits = make_logits(1, vocab_size, seed=4, spread=1.5)
    one = make_tables([row], [0], vocab_size, device=device)
    columns = ("records", "edit_ids", "edit_values", "last_token", "counts")
    tables = replace(one, **{name: getattr(one, name)[:1].repeat_interleave(number, 0) for name in columns})
    tables.records[:, Field.CHOICE] = torch.arange(number)
    drawn, is_bad = outputs(number, device)
    ops.sample(logits.to(device).expand(number, -1), int32(range(number), device), tables, drawn, is_bad)
    counts = torch.bincount(drawn.cpu(), minlength=vocab_size)
    probs = distribution(row, logits[0])
    assert probs is not None
    assert counts[probs == 0].sum() == 0
    likely = probs * number >= 5
    expected = torch.cat((probs[likely] * number, (probs[~likely].sum() * number)[None])).clamp(min=1e-9)
    found = torch.cat((counts[likely], counts[~likely].sum()[None]))
    freedom = int(likely.sum())
    assert ((found - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5 + 8
