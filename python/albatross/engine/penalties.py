"""Counts of drawn ids by slot, for the presence, frequency and repetition penalties.

Two tables of [slots, vocabulary]: the decaying count of each id and whether it was ever drawn. They take
five bytes an id and slot, so they are made when the first request asks for a penalty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PenaltyTables:
    """All methods change the tables in place; `apply` returns new logits."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._counts = torch.empty(0)
        self._seen = torch.empty(0)

    def reset(self, slot: int, prompt: Sequence[int] | None) -> None:
        """Forgets the slot's last user. `prompt` counts as drawn, each id as often as it stands there."""
        if not self._counts.numel():
            self._counts = torch.zeros(self._shape, device=self._device)
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[slot] = 0
        self._seen[slot] = False
        if prompt is not None:
            ids = torch.tensor(prompt, dtype=torch.long, device=self._device)
            self._counts[slot] += torch.bincount(ids, minlength=self._shape[1])
            self._seen[slot, ids] = True

    def apply(self, logits: Tensor, slots: list[int], *, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Tensor:
        """Penalised logits [K, V]; the penalties are [K, 1]. The repetition penalty divides positive logits and multiplies
        negative ones (Keskar et al. 2019, CTRL, section 4.1, with the sign rule all engines use)."""
        seen = self._seen[slots]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated - presence, logits) - frequency * self._counts[slots]

    def count(self, slots: list[int], token_ids: Tensor, decay: Tensor) -> None:
        """One step: every count of these slots decays, then each slot's drawn id counts one more."""
        self._counts[slots] *= decay
        self._counts[slots, token_ids] += 1
        self._seen[slots, token_ids] = True
