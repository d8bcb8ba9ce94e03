"""The bytes of server-sent events: one template a request, into which each token's escaped text is spliced.

Knows nothing of engines and connections; used by `streaming`, once a token, so nothing here builds an object per token
unless the request asks for log-probabilities, token ids or running usage.
"""

from typing import Any

import orjson

from .plan import Plan
from .responses import AnswerMeta

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ChunkTemplate:
    """`head(index) + <escaped text> + tail` is a chunk that holds nothing but text; the methods make all others."""

    def __init__(self, plan: Plan, meta: AnswerMeta) -> None:
        self._is_chat = plan.kind == "chat"
        envelope = {
            "id": meta.id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": meta.created,
            "model": meta.model,
            "system_fingerprint": meta.system_fingerprint,
        }
        self._start = b"data: " + orjson.dumps(envelope)[:-1]
        self._end = b',"usage":null}\n\n' if plan.include_usage else b"}\n\n"
        self._text_key = b'"delta":{"content":' if self._is_chat else b'"text":'
        self.tail = (b"}" if self._is_chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._end

    def head(self, index: int) -> bytes:
        return self._start + b',"choices":[{"index":%d,' % index + self._text_key

    def role(self, index: int, extra: dict[str, Any]) -> bytes:
        """The first chunk of a chat choice."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, None, extra)

    def detailed(self, index: int, text: str, fields: dict[str, Any], usage: dict[str, int] | None) -> bytes:
        """A chunk with text and whatever else the request asks for."""
        payload: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        choice = {"index": index, **payload, "logprobs": None, "finish_reason": None, **fields}
        return self._chunk(choice, usage, {})

    def usage(self, usage: dict[str, int]) -> bytes:
        """The last chunk, with the totals and no choice."""
        return self._start + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _chunk(self, choice: dict[str, Any], usage: dict[str, int] | None, extra: dict[str, Any]) -> bytes:
        end = self._end if usage is None else b',"usage":' + orjson.dumps(usage) + b"}\n\n"
        more = b"," + orjson.dumps(extra)[1:-1] if extra else b""
        return self._start + b',"choices":[' + orjson.dumps(choice) + b"]" + more + end


def error_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
