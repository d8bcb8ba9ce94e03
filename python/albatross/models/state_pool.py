"""The pool of recurrent states: one slot a sequence, slot-major, so that a fork, save or restore is one copy of each tensor.

Knows nothing of requests: who holds which slot is the scheduler's business. The model reads and writes slots in place.
"""

from collections.abc import Sequence

import torch

from albatross.config import ModelConfig
from albatross.constants import HEAD_SIZE


class StatePool:
    """States of `num_slots` sequences, all zero at first.

    wkv: [S, L, H, 64 value, 64 key] in `state_dtype`. shift: [S, L, 2, C] in the model's own type, since it holds
    activations (the LN1 and LN2 outputs of the last token), which are in that type within a sequence as well.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, device: torch.device, state_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.num_slots = num_slots
        self.wkv = torch.zeros(
            num_slots, config.num_layers, config.num_heads, HEAD_SIZE, HEAD_SIZE, device=device, dtype=state_dtype
        )
        self.shift = torch.zeros(num_slots, config.num_layers, 2, config.hidden_size, device=device, dtype=dtype)

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in (self.wkv, self.shift))

    def zero(self, slots: Sequence[int]) -> None:
        """Makes `slots` the state of a sequence that has read nothing."""
        index = self._index(slots)
        self.wkv.index_fill_(0, index, 0)
        self.shift.index_fill_(0, index, 0)

    def copy(self, src: int, dst: Sequence[int]) -> None:
        """Makes every slot of `dst` a copy of slot `src`."""
        self._check((src,))
        index = self._index(dst)
        for states in (self.wkv, self.shift):
            states.index_copy_(0, index, states[src].clone().expand(len(dst), *states.shape[1:]))

    def read(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of one slot on the pool's device: wkv [L, H, 64, 64] and shift [L, 2, C]."""
        self._check((slot,))
        return self.wkv[slot].clone(), self.shift[slot].clone()

    def write(self, slot: int, wkv: torch.Tensor, shift: torch.Tensor) -> None:
        """Overwrites one slot with what `read` gave, from any device, in any floating type. Raises ValueError on other shapes."""
        self._check((slot,))
        for name, tensor, target in (("wkv", wkv, self.wkv[slot]), ("shift", shift, self.shift[slot])):
            if tensor.shape != target.shape:
                raise ValueError(f"{name} of a saved state has shape {list(tensor.shape)}; this model's is {list(target.shape)}.")
        self.wkv[slot].copy_(wkv)
        self.shift[slot].copy_(shift)

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        """The slots on the pool's device. Their copy is made from pinned memory, so that nothing waits for the device."""
        self._check(slots)
        return torch.tensor(slots, pin_memory=self.wkv.is_cuda).to(self.wkv.device, non_blocking=True)

    def _check(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise IndexError(f"Slot {slot} is outside the pool of {self.num_slots} slots.")
