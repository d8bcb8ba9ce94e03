"""What one request wants drawn: the sampling law's parameters and the conditions that end it.

Ranges are checked here and nowhere else. The law itself is in `reference/sampling.py`.
"""

import math
from collections.abc import Collection
from typing import Literal

import msgspec

from albatross.constants import MAX_EDITED_IDS, MAX_LOGPROBS
from albatross.errors import InvalidRequestError

SamplerOrder = Literal["temperature-first", "rwkv-classic"]
_ORDERS = ("temperature-first", "rwkv-classic")
_MAX_SEED = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request. Every field has the value that changes nothing as its default.

    temperature 0, top_p 0 or top_k 1 means greedy: the highest logit, the lowest id on ties. top_k 0 and -1 both mean off.
    penalty_decay multiplies every count once a step; 1 is exactly OpenAI's law. penalize_prompt lets prompt tokens count.
    sampler_order "rwkv-classic" applies top_p at temperature 1 and the temperature afterwards, as older RWKV code did.
    logprobs asks for that many alternatives a token (0: the drawn token's only; None: none), of the raw logits; prompt_logprobs
    asks for the same of each token of the prompt but the first.
    max_tokens None means until a stop, bounded by the engine's own limit. stop_token_ids end the answer and are not text.
    logit_bias maps ids to values in -100..100. logit_bias, banned_token_ids and stop_token_ids together name at most 1024 ids.
    Raises InvalidRequestError naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalty_decay: float = 1.0
    penalize_prompt: bool = False
    sampler_order: SamplerOrder = "temperature-first"
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0, 2)
        _in_range("top_p", self.top_p, 0, 1)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 10)
        _in_range("penalty_decay", self.penalty_decay, 0, 1)
        _at_least("top_k", self.top_k, -1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens must not exceed max_tokens ({self.max_tokens}), but is {self.min_tokens}.", "min_tokens"
                )
        if self.seed is not None and not -_MAX_SEED <= self.seed < _MAX_SEED:
            raise InvalidRequestError(f"seed must fit in 64 bits, but is {self.seed}.", "seed")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
                _in_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.sampler_order not in _ORDERS:
            raise InvalidRequestError(
                f"sampler_order must be one of {', '.join(_ORDERS)}, but is {self.sampler_order!r}.", "sampler_order"
            )
        for token_id, bias in self.logit_bias.items():
            _at_least("logit_bias", token_id, 0)
            _in_range("logit_bias", bias, -100, 100)
        for name in ("stop_token_ids", "banned_token_ids"):
            for token_id in getattr(self, name):
                _at_least(name, token_id, 0)
        _few_enough(logit_bias=self.logit_bias, banned_token_ids=self.banned_token_ids, stop_token_ids=self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def has_limits(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if an id in any field is not below `vocab_size`."""
        for name in ("logit_bias", "stop_token_ids", "banned_token_ids"):
            for token_id in getattr(self, name):
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} must hold token ids below {vocab_size}, this model's vocabulary, but holds {token_id}.", name
                    )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a number from {low} to {high}, but is {value!r}.", name)


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidRequestError(f"{name} must be a whole number of at least {low}, but is {value!r}.", name)


def _few_enough(**fields: Collection[int]) -> None:
    number = sum(map(len, fields.values()))
    if number > MAX_EDITED_IDS:
        raise InvalidRequestError(
            f"{', '.join(fields)} must name at most {MAX_EDITED_IDS} ids together, but name {number}; leave some out.",
            max(fields, key=lambda name: len(fields[name])),
        )
