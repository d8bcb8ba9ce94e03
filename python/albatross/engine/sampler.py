"""The sampling law: from raw logits to drawn ids, every row by its own parameters.

Per row, in this order: + logit_bias; repetition penalty; - presence for every id drawn before, - frequency * count;
forbidden ids; temperature; top_k; top_p; min_p; draw. A count is the sum of penalty_decay^(age) over the times its id
was drawn, age 0 for the last step; presence does not decay. Logprobs are of the raw logits. A row whose logits are not
finite is marked and draws nothing of worth; its neighbours never notice. What a row draws does not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from albatross.constants import END_OF_TEXT_ID
from albatross.engine import rng
from albatross.engine.messages import TokenLogprobs
from albatross.engine.penalties import PenaltyTables
from albatross.engine.request import Request
from albatross.sampling_params import SamplingParams

_NUCLEUS = 256  # ids ranked at first; a row that keeps more of its distribution is ranked whole
_NO_TOP_K = 1 << 30
_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition", "decay")


@dataclass(slots=True)
class Samples:
    """What one call drew: one id and one flag a row, and log-probabilities by row for those that asked."""

    token_ids: list[int]
    is_bad: list[bool]
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Holds each slot's parameters and penalty counts. Knows slots, not requests' lives."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._forbidden = torch.empty(0, dtype=torch.long, device=device)
        self._columns = np.zeros((num_slots, len(_COLUMNS)), np.float32)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._choices = np.zeros(num_slots, np.uint64)
        self._params: list[SamplingParams] = [SamplingParams()] * num_slots
        self._stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self._penalties = PenaltyTables(num_slots, vocab_size, device)

    def forbid(self, token_ids: Sequence[int]) -> None:
        """Ids no row ever draws."""
        self._forbidden = torch.tensor(tuple(token_ids), dtype=torch.long, device=self.device)

    def assign(self, request: Request) -> None:
        """Prepares the slots of a request's streams for its parameters; counts start at zero."""
        params = request.params
        top_k = params.top_k if params.top_k > 0 else _NO_TOP_K
        for stream in request.streams:
            self._columns[stream.slot] = (
                params.temperature, top_k, params.top_p, params.min_p,
                params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.penalty_decay,
            )  # fmt: skip
            self._seeds[stream.slot] = request.seed
            self._choices[stream.slot] = stream.choice
            self._params[stream.slot] = params
            self._stop_ids[stream.slot] = tuple({END_OF_TEXT_ID, *params.stop_token_ids})
            if params.has_penalties:
                self._penalties.reset(stream.slot, request.prompt if params.penalize_prompt else None)

    def sample(self, logits: Tensor, slots: list[int], positions: list[int]) -> Samples:
        """Draws one id a row. logits: [K, V] float32, not changed; slots, positions: K each, the row's slot and the number
        of tokens it drew before."""
        finite = torch.isfinite(logits).all(dim=-1)
        adjusted = self._adjust(logits, slots, positions)
        token_ids = adjusted.argmax(dim=-1)
        params = [self._params[slot] for slot in slots]
        drawing = [row for row, p in enumerate(params) if not p.is_greedy]
        if drawing:
            token_ids[drawing] = self._draw(
                adjusted[drawing], [slots[row] for row in drawing], [positions[row] for row in drawing]
            )
        penalised = [row for row, p in enumerate(params) if p.has_penalties]
        if penalised:
            chosen = [slots[row] for row in penalised]
            self._penalties.count(chosen, token_ids[penalised], self._column("decay", chosen))
        is_bad = (~finite).tolist()
        return Samples(token_ids.tolist(), is_bad, self._logprobs(logits, token_ids, params, is_bad))

    def _column(self, name: str, slots: list[int]) -> Tensor:
        return torch.from_numpy(self._columns[slots, _COLUMNS.index(name)]).to(self.device).unsqueeze(1)

    def _adjust(self, logits: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """A copy of the logits with biases, penalties and forbidden ids applied."""
        adjusted = logits.clone()
        self._add_bias(adjusted, slots)
        penalised = [row for row, slot in enumerate(slots) if self._params[slot].has_penalties]
        if penalised:
            chosen = [slots[row] for row in penalised]
            adjusted[penalised] = self._penalties.apply(
                adjusted[penalised], chosen,
                presence=self._column("presence", chosen),
                frequency=self._column("frequency", chosen),
                repetition=self._column("repetition", chosen),
            )  # fmt: skip
        self._forbid(adjusted, slots, positions)
        return adjusted

    def _add_bias(self, adjusted: Tensor, slots: list[int]) -> None:
        rows, ids, values = [], [], []
        for row, slot in enumerate(slots):
            for token_id, bias in self._params[slot].logit_bias.items():
                rows.append(row)
                ids.append(token_id)
                values.append(bias)
        if rows:
            adjusted[rows, ids] += torch.tensor(values, device=self.device)

    def _forbid(self, adjusted: Tensor, slots: list[int], positions: list[int]) -> None:
        if len(self._forbidden):
            adjusted.index_fill_(1, self._forbidden, -torch.inf)
        rows: list[int] = []
        ids: list[int] = []
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            params = self._params[slot]
            banned = params.banned_token_ids
            if position < params.min_tokens:
                banned = banned + self._stop_ids[slot]
            rows.extend([row] * len(banned))
            ids.extend(banned)
        if rows:
            adjusted[rows, ids] = -torch.inf

    def _draw(self, adjusted: Tensor, slots: list[int], positions: list[int]) -> Tensor:
        """Ids drawn from [K, V] logits at the slots' temperatures and limits."""
        counters = np.asarray(positions, np.uint64)
        numbers = rng.uniform(self._seeds[slots], self._choices[slots], counters)
        number = torch.from_numpy(numbers).to(self.device).unsqueeze(1)
        temperature = self._column("temperature", slots)
        classic = [row for row, slot in enumerate(slots) if self._params[slot].sampler_order == "rwkv-classic"]
        scale = temperature.clone()
        scale[classic] = 1.0
        probs = torch.softmax(adjusted / scale, dim=-1)
        limited = [row for row, slot in enumerate(slots) if self._params[slot].has_limits]
        if limited:
            chosen = [slots[row] for row in limited]
            top_k, top_p, min_p = (self._column(name, chosen) for name in ("top_k", "top_p", "min_p"))
            probs[limited] = _keep_likeliest(probs[limited], top_k, top_p, min_p)
        if classic:
            probs[classic] = probs[classic].pow(1 / temperature[classic])
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        place = torch.searchsorted(cumulative, number * cumulative[:, -1:], right=True)
        return place.squeeze(1).clamp(max=self.vocab_size - 1)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, params: list[SamplingParams], is_bad: list[bool]
    ) -> dict[int, TokenLogprobs]:
        rows = [row for row, p in enumerate(params) if p.logprobs is not None and not is_bad[row]]
        if not rows:
            return {}
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        drawn = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1).tolist()
        most = max(params[row].logprobs or 0 for row in rows)
        top = logprobs.topk(min(most, self.vocab_size), dim=-1)
        values, ids = top.values.tolist(), top.indices.tolist()
        result = {}
        for i, row in enumerate(rows):
            wanted = params[row].logprobs or 0
            result[row] = TokenLogprobs(drawn[i], tuple(ids[i][:wanted]), tuple(values[i][:wanted]))
        return result


def _keep_likeliest(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`probs` with every id outside the limits at zero. probs: [K, V]; limits: [K, 1].

    Sorted by probability, an id stays while fewer than top_k ids, and less than top_p of the top_k's mass, come before
    it, and while it has min_p times the highest probability. Ids tied with the last one that stays, stay.
    """
    width = min(_NUCLEUS, probs.shape[1])
    threshold, is_exact = _threshold(probs.topk(width, dim=-1).values, probs.sum(dim=-1, keepdim=True), top_k, top_p, min_p)
    if width < probs.shape[1] and not bool(is_exact.all()):
        rest = (~is_exact).nonzero().squeeze(1)
        values = probs[rest].sort(dim=-1, descending=True).values
        threshold[rest], _ = _threshold(values, probs[rest].sum(dim=-1, keepdim=True), top_k[rest], top_p[rest], min_p[rest])
    return torch.where(probs >= threshold, probs, 0.0)


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
