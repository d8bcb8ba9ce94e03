"""Log-probabilities in the two shapes of the OpenAI API, and those of prompts in vLLM's.

A token that is not UTF-8 alone is shown as `bytes:\\x..`, one without text as its name; minus infinity as -9999.
JSON has no infinity. Called by `responses` and `streaming`, and only for requests that ask for log-probabilities.
"""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from albatross.constants import END_OF_TEXT_ID
from albatross.engine.client import PromptTokenLogprobs, TokenLogprobs
from albatross.tokenizer.world import WorldTokenizer

LOWEST = -9999.0


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


def prompt_logprobs(
    tokenizer: WorldTokenizer, token_ids: Sequence[int], logprobs: Sequence[PromptTokenLogprobs | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` of one prompt: null for the first token, then by id the token itself and the likeliest ones."""
    found: list[dict[str, dict[str, Any]] | None] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            found.append(None)
            continue
        ranked = [(token_id, entry.logprob, entry.rank)]
        top = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        ranked += [(top_id, value, rank) for rank, (top_id, value) in enumerate(top, start=1) if top_id != token_id]
        found.append({
            str(each): {"logprob": _finite(value), "rank": rank, "decoded_token": token_name(tokenizer, each)}
            for each, value, rank in ranked
        })  # fmt: skip
    return found


class CompletionLogprobs:
    """Builds the `logprobs` of one completion choice, whole or chunk by chunk; `text_offset` counts characters."""

    def __init__(self, tokenizer: WorldTokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def echo(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Those of the prompt, which come first. Its text ends with it: a character cut there does not go on in the answer."""
        rendered = self.render(token_ids, logprobs)
        self._offset += len(self._decoder.decode(b"", final=True))
        return rendered

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [token_name(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest tokens and the one that is there, by name."""
        if entry is None:
            return None
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
