"""The sampling law in plain torch: the meaning of the native op, and its CPU implementation.

Per row, in this order: + edits (logit_bias; -inf for banned ids); repetition penalty; - presence for every id drawn before,
- frequency * count; ids the vocabulary or a grammar forbids; temperature; top_k; top_p; min_p; draw. Everything a row needs
stands in tables by slot, so what it draws depends on nothing else. Knows nothing of the op registry and checks nothing.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import accumulate

import torch
from torch import Tensor

from albatross.constants import LEAST_COUNT, MAX_EDITED_IDS
from albatross.reference.philox import uniform

RECORD_WORDS = 16

_NUCLEUS = 256  # ids ranked at first; a row that keeps more of its distribution is ranked whole
_ALL_IDS = 1 << 30  # top_k of a row without one
_TILE = 128  # ids summed at once
_BELOW_ONE = 1 - 2.0**-52
_ID_BITS = 0x7FFFFFFF  # of an edit's id; the sign bit says that it is a ban for the first min_tokens tokens alone


class Field(IntEnum):
    """Columns of a slot's record, [S, 16] int32; the first seven hold the bits of a float32. As SlotRecord of sampling.h."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5
    DECAY = 6
    TOP_K = 7  # 0: off
    SEED_LOW = 8
    SEED_HIGH = 9
    CHOICE = 10
    POSITION = 11  # tokens drawn; one more after each draw
    MIN_TOKENS = 12
    NUM_EDITS = 13
    FLAGS = 14


class Flag(IntFlag):
    GREEDY = 1  # the highest logit, the lowest id on ties
    CLASSIC = 2  # limits at temperature 1, the temperature after them
    PENALTIES = 4
    LIMITS = 8  # top_k, top_p or min_p


@dataclass(slots=True)
class SlotTables:
    """What the op knows of each slot, and the ids no slot ever draws."""

    records: Tensor  # [S, 16] int32, see `Field`
    edit_ids: Tensor  # [S, M] int32: the first NUM_EDITS of a row are distinct ids; the sign bit is set on those banned only
    # for the first MIN_TOKENS tokens
    edit_values: Tensor  # [S, M] float32, added to the logits of edit_ids; -inf bans an id
    forbidden: Tensor  # [W] int32: bit mask of ids no slot draws
    last_token: Tensor  # [S] int64: what a slot drew last
    counts: Tensor | None  # [S, V] float32: decayed counts of ids, above zero once an id was drawn; None: no penalties

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, device: torch.device) -> "SlotTables":
        """Tables of slots that draw greedily and without penalties; `counts` is left out."""
        capacity = MAX_EDITED_IDS + 1  # the end of text beside the ids a request names
        records = torch.zeros(num_slots, RECORD_WORDS, dtype=torch.int32, device=device)
        records[:, Field.FLAGS] = Flag.GREEDY
        return cls(
            records=records,
            edit_ids=torch.zeros(num_slots, capacity, dtype=torch.int32, device=device),
            edit_values=torch.zeros(num_slots, capacity, device=device),
            forbidden=torch.zeros(num_words(vocab_size), dtype=torch.int32, device=device),
            last_token=torch.zeros(num_slots, dtype=torch.long, device=device),
            counts=None,
        )


def num_words(vocab_size: int) -> int:
    """int32 words of a bit mask over the vocabulary; id i is bit i % 32 of word i // 32."""
    return (vocab_size + 31) // 32


def sample(
    logits: Tensor, slots: Tensor, tables: SlotTables, drawn: Tensor, is_bad: Tensor, *, allowed: Tensor | None = None
) -> None:
    """Draws one id for each row. See `albatross.ops.sampling.sample` for shapes and what is written."""
    places = slots.tolist()
    if min(places, default=0) < 0:
        rows = (slots >= 0).nonzero().squeeze(1)
        some_drawn, some_bad, masks = drawn[rows], is_bad[rows], None if allowed is None else allowed[rows]
        sample(logits[rows], slots[rows], tables, some_drawn, some_bad, allowed=masks)
        drawn[rows], is_bad[rows] = some_drawn, some_bad
        return
    if not places:
        return
    index = slots.long()
    batch = tables.records.index_select(0, index)
    columns = batch.t().tolist()
    adjusted = _adjust(logits, places, batch, columns, tables, allowed)
    bad = _find_bad(logits, adjusted)
    token_ids = _choose(adjusted, batch, columns)
    is_bad.zero_()
    if any(bad):
        is_bad.copy_(torch.tensor(bad))
        token_ids[bad] = 0
    if tables.counts is not None:
        counted = [row for row in _rows(columns, Flag.PENALTIES) if not bad[row]]
        if counted:
            decay = _column(batch[counted], Field.DECAY)
            _count(tables.counts, [places[row] for row in counted], token_ids[counted].tolist(), decay)
    drawn.copy_(token_ids)
    tables.last_token.index_copy_(0, index, drawn)
    tables.records.select(1, Field.POSITION).index_add_(0, index, torch.ones_like(slots))


def _adjust(
    logits: Tensor, places: Sequence[int], batch: Tensor, columns: list[list[int]], tables: SlotTables, allowed: Tensor | None
) -> Tensor:
    """The logits with edits, penalties and bans; `logits` itself where no row has any. batch, columns: the rows' records."""
    has_edits, is_any_forbidden = any(columns[Field.NUM_EDITS]), bool(tables.forbidden.count_nonzero())
    penalised = [] if tables.counts is None else _rows(columns, Flag.PENALTIES)
    if not (has_edits or is_any_forbidden or penalised or allowed is not None):
        return logits
    adjusted = logits.clone()
    if has_edits:
        _add_edits(adjusted, places, columns, tables)
    if penalised and tables.counts is not None:
        seen = tables.counts[[places[row] for row in penalised]]
        adjusted[penalised] = _penalise(adjusted[penalised], seen, batch[penalised].view(torch.float32))
    if is_any_forbidden:
        adjusted.index_fill_(1, _ids_in(tables.forbidden), -torch.inf)
    if allowed is not None:
        adjusted.masked_fill_(~_unpack_bits(allowed).flatten(1)[:, : logits.shape[1]], -torch.inf)
    return adjusted


def _add_edits(adjusted: Tensor, places: Sequence[int], columns: list[list[int]], tables: SlotTables) -> None:
    """Adds each row's edits to `adjusted` [K, V] in place. places: the rows' slots; columns: of their records."""
    for row, (slot, number) in enumerate(zip(places, columns[Field.NUM_EDITS], strict=True)):
        if not number:
            continue
        entries = tables.edit_ids[slot, :number].long()
        adjusted[row, entries & _ID_BITS] += tables.edit_values[slot, :number]
        if columns[Field.POSITION][row] < columns[Field.MIN_TOKENS][row]:
            adjusted[row, (entries & _ID_BITS)[entries < 0]] = -torch.inf


def _penalise(logits: Tensor, counts: Tensor, settings: Tensor) -> Tensor:
    """Penalised logits [K, V]. counts: [K, V], above zero for every id drawn before; settings: [K, 16] float32. The repetition
    penalty divides positive logits and multiplies negative ones (Keskar et al. 2019, CTRL, section 4.1, with the sign rule
    all engines use)."""
    presence, frequency, repetition = settings[:, Field.PRESENCE : Field.REPETITION + 1].unsqueeze(2).unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition) if bool((repetition != 1).any()) else logits
    return torch.where(counts > 0, repeated - presence, logits).sub_(frequency * counts)


def _unpack_bits(words: Tensor) -> Tensor:
    """The bits of [..., W] int32, lowest first, as [..., W, 32] bool."""
    return (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32) & 1).bool()


def _ids_in(mask: Tensor) -> Tensor:
    """Ids whose bits are set in a mask [W], of which most words are zero."""
    words = mask.nonzero().squeeze(1)
    places = _unpack_bits(mask[words]).nonzero()
    return 32 * words[places[:, 0]] + places[:, 1]


def _find_bad(logits: Tensor, adjusted: Tensor) -> list[bool]:
    """Which rows have a logit that is not finite, or no id left to draw."""
    bad = [not math.isfinite(total) for total in logits.sum(dim=-1).tolist()]
    if any(bad):  # or their sum alone passes float32's range
        bad = (~logits.isfinite().all(dim=-1)).tolist()
    if adjusted is logits:
        return bad
    return [is_bad or not math.isfinite(top) for is_bad, top in zip(bad, adjusted.amax(dim=-1).tolist(), strict=True)]


def _choose(adjusted: Tensor, batch: Tensor, columns: list[list[int]]) -> Tensor:
    """The id of each row of adjusted logits [K, V]; they are on the host."""
    greedy = _rows(columns, Flag.GREEDY)
    if len(greedy) == len(batch):
        return _argmax(adjusted)
    if not greedy:
        return _draw(adjusted, batch, columns)
    drawing = sorted({*range(len(batch))}.difference(greedy))
    records = batch[drawing]
    token_ids = torch.empty(len(batch), dtype=torch.long)
    token_ids[greedy] = _argmax(adjusted[greedy])
    token_ids[drawing] = _draw(adjusted[drawing], records, records.t().tolist())
    return token_ids


def _argmax(x: Tensor) -> Tensor:
    """By numpy, whose argmax takes a tenth of the time of torch's on the CPU; both give the lowest of equal places."""
    return torch.from_numpy(x.numpy(force=True).argmax(axis=-1))


def _draw(adjusted: Tensor, batch: Tensor, columns: list[list[int]]) -> Tensor:
    """Ids drawn from [K, V] logits at the rows' temperatures and limits."""
    temperature = _column(batch, Field.TEMPERATURE)
    classic = _rows(columns, Flag.CLASSIC)
    scale = temperature
    if classic:
        scale = temperature.clone()
        scale[classic] = 1.0
    probs = torch.softmax(adjusted / scale, dim=-1)
    limited = _rows(columns, Flag.LIMITS)
    if len(limited) == len(batch):
        _keep_likeliest(probs, batch)
    elif limited:
        probs[limited] = _keep_likeliest(probs[limited], batch[limited])
    if classic:
        probs[classic] = probs[classic].pow(1 / temperature[classic])
    numbers = [
        uniform((low, high), choice, position)
        for low, high, choice, position in zip(*columns[Field.SEED_LOW : Field.POSITION + 1], strict=True)
    ]
    return torch.tensor(_walk(probs, numbers))


def _walk(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """First id at which the running sum of a row of weights [K, V] exceeds the row's number times the whole sum: first the tile
    of ids, by the tiles' sums, then the id in it. Running sums are in float64."""
    vocab_size = weights.shape[1]
    if vocab_size % _TILE:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _TILE))
    tiles = weights.unflatten(1, (-1, _TILE))
    ends = [list(accumulate(sums, initial=0.0)) for sums in tiles.sum(dim=-1).tolist()]
    targets = [number * end[-1] for number, end in zip(numbers, ends, strict=True)]
    chosen = [min(bisect_right(end, target), len(end) - 1) - 1 for end, target in zip(ends, targets, strict=True)]
    token_ids = []
    for row, tile in enumerate(tiles[range(len(chosen)), chosen].tolist()):
        inside = list(accumulate(tile))
        # The tile's sum may have been rounded up; the target must still be met inside, by an id that has weight.
        target = min(targets[row] - ends[row][chosen[row]], inside[-1] * _BELOW_ONE)
        token_ids.append(min(chosen[row] * _TILE + bisect_right(inside, target), vocab_size - 1))
    return token_ids


def _keep_likeliest(probs: Tensor, batch: Tensor) -> Tensor:
    """`probs` [K, V], in place, with every id outside the limits at zero.

    Sorted by probability, an id stays while fewer than top_k ids, and less than top_p of the top_k's mass, come before
    it, and while it has min_p times the highest probability. Ids tied with the last one that stays, stay.
    """
    top_k, top_p, min_p = batch[:, Field.TOP_K, None], _column(batch, Field.TOP_P), _column(batch, Field.MIN_P)
    top_k = top_k.where(top_k > 0, _ALL_IDS)
    width = min(_NUCLEUS, probs.shape[1])
    threshold, is_exact = _threshold(probs.topk(width, dim=-1).values, probs.sum(dim=-1, keepdim=True), top_k, top_p, min_p)
    if width < probs.shape[1] and not bool(is_exact.all()):
        rest = (~is_exact).nonzero().squeeze(1)
        values = probs[rest].sort(dim=-1, descending=True).values
        threshold[rest], _ = _threshold(values, probs[rest].sum(dim=-1, keepdim=True), top_k[rest], top_p[rest], min_p[rest])
    return probs.mul_(probs >= threshold)


def _threshold(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest probability that stays, [K, 1], and for which rows the given values were enough to know it, [K].

    values: the highest probabilities of each row in descending order.
    """
    width = values.shape[1]
    in_k = torch.arange(width, device=values.device) < top_k
    mass = torch.where(in_k, values, 0.0).double().cumsum(dim=-1)
    mass_in_k = torch.where(top_k <= width, mass[:, -1:], total.double())
    before = mass - torch.where(in_k, values, 0.0)
    kept = in_k & (before < top_p * mass_in_k) & (values >= min_p * values[:, :1])
    num_kept = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return values.gather(1, num_kept - 1), (num_kept < width).squeeze(1) | (top_k <= width).squeeze(1)


def _count(counts: Tensor, places: Sequence[int], token_ids: Sequence[int], decay: Tensor) -> None:
    """One step: every count of these slots decays, though never to nothing, then each slot's drawn id counts one more."""
    for slot, factor in zip(places, decay.squeeze(1).tolist(), strict=True):
        if factor < 1:
            row = counts[slot]
            row.copy_(torch.where(row > 0, (row * factor).clamp_(min=LEAST_COUNT), row))
    counts[places, token_ids] += 1


def _column(batch: Tensor, field: Field) -> Tensor:
    """A column of float32 settings, [K, 1]."""
    return batch.view(torch.float32)[:, field, None]


def _rows(columns: list[list[int]], flag: Flag) -> list[int]:
    """Rows whose records have this flag."""
    bit = int(flag)  # operators of plain numbers are many times faster
    return [row for row, flags in enumerate(columns[Field.FLAGS]) if flags & bit]
