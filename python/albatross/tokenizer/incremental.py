"""Token ids of one stream to text, piece by piece: only whole characters leave, as a token may hold part of one.

Knows nothing of stop strings or requests; the output processor keeps one decoder per stream.
"""

import codecs
from collections.abc import Iterable

from albatross.tokenizer.world import WorldTokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """What `feed` and `flush` return, joined, equals `WorldTokenizer.decode` of all the ids at once."""

    def __init__(self, tokenizer: WorldTokenizer) -> None:
        self._texts = tokenizer.texts
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _new_decoder(errors="replace")
        self._is_pending = False  # whether the decoder holds the first bytes of a character

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete. Bytes that no further token could mend become U+FFFD.

        Ids must be below the tokenizer's `vocab_size`. Costs time in proportion to the bytes of `ids` alone.
        """
        parts = []
        for token_id in ids:
            text = self._texts[token_id]
            if text is None or self._is_pending:
                text = self._decoder.decode(self._token_bytes(token_id))
                self._is_pending = bool(self._decoder.getstate()[0])
            parts.append(text)
        return "".join(parts)

    def flush(self) -> str:
        """The end of the stream: U+FFFD if a character was left incomplete, else nothing."""
        self._is_pending = False
        return self._decoder.decode(b"", final=True)
