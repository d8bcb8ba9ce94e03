"""Log-probabilities of drawn tokens in the two shapes of the OpenAI API.

A token that is not UTF-8 alone is shown as `bytes:\\x..`, one without text as its name; minus infinity as -9999.
Called by `responses` and `streaming`, and only for requests that ask for log-probabilities.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from albatross.constants import END_OF_TEXT_ID
from albatross.engine.client import TokenLogprobs
from albatross.tokenizer.world import WorldTokenizer

LOWEST = -9999.0  # JSON has no infinity


def token_name(tokenizer: WorldTokenizer, token_id: int) -> str:
    text = tokenizer.texts[token_id]
    if text is None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))
    if not text:
        return "<|endoftext|>" if token_id == END_OF_TEXT_ID else f"<|{token_id}|>"
    return text


def chat_logprobs(
    tokenizer: WorldTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a chat choice or of one of its chunks."""
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        item = _chat_entry(tokenizer, token_id, entry.logprob)
        top = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        item["top_logprobs"] = [_chat_entry(tokenizer, top_id, value) for top_id, value in top]
        content.append(item)
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds the `logprobs` of one completion choice, whole or chunk by chunk; `text_offset` counts characters."""

    def __init__(self, tokenizer: WorldTokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the drawn one, by name."""
        best = zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False)
        top = {token_name(self._tokenizer, top_id): _finite(value) for top_id, value in best}
        return {**top, token_name(self._tokenizer, token_id): _finite(entry.logprob)}


def _chat_entry(tokenizer: WorldTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if not math.isnan(logprob) else LOWEST
