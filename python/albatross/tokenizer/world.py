"""The RWKV World vocabulary, or any prefix of it: text to token ids and back.

Tokens are byte strings and encoding is greedy longest match over UTF-8. Vocabulary and encoder come from the
pyrwkv-tokenizer wheel. Knows nothing of models, prompts or streams; used by whoever holds text.
"""

import ast
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pyrwkv_tokenizer

from albatross.constants import END_OF_TEXT_ID, WORLD_VOCAB_SIZE
from albatross.errors import ConfigError, InvalidRequestError

_VOCABULARY = Path(pyrwkv_tokenizer.__file__).parent / "rwkv_vocab_v20230424.txt"
_QUOTES = ("'", '"')
_PIECE_CHARS = 1 << 16  # text encoded in one go: a few milliseconds, in which no other thread runs


class WorldTokenizer:
    """Encodes and decodes with the ids below `vocab_size` alone.

    The encoder is built at the first `encode` (0.6 s for the whole vocabulary, 15 ms for 4,096 ids) and shared by all
    tokenizers of that size. Raises ConfigError if `vocab_size` is not positive or the vocabulary file is damaged.
    """

    vocab_size: int
    texts: list[str | None]  # by id: the token's text, "" for an id without entry, None for bytes that are not UTF-8 alone
    undefined_ids: tuple[int, ...]  # ids without an entry, except end of text; a model must never be let draw one

    def __init__(self, vocab_size: int = WORLD_VOCAB_SIZE) -> None:
        if vocab_size < 1:
            raise ConfigError(f"vocab_size must be at least 1, but is {vocab_size}.")
        texts, tokens = _load_tables(vocab_size)
        self.vocab_size = vocab_size
        self.undefined_ids = tuple(range(len(tokens), vocab_size))
        self.texts = texts + [""] * len(self.undefined_ids)
        self._bytes = tokens + [b""] * len(self.undefined_ids)
        self._longest = max(map(len, tokens))

    def encode(self, text: str) -> list[int]:
        """Raises InvalidRequestError for a lone surrogate, or a byte that a vocabulary below 257 ids lacks."""
        pieces = list(self.encode_pieces(text))
        return pieces[0] if len(pieces) == 1 else [token_id for piece in pieces for token_id in piece]

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """Yields the ids of `encode(text)` in pieces of bounded cost, so that a server can do other work in between."""
        start = 0
        while True:
            chunk = text[start : start + _PIECE_CHARS]
            start += len(chunk)
            ids = self._encode_chunk(chunk)
            if start < len(text):
                start -= self._withdraw_tail(ids)
            yield ids
            if start >= len(text):
                return

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; none for end of text and for any id without an entry."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def _encode_chunk(self, chunk: str) -> list[int]:
        try:
            data = chunk.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(chunk[error.start]):04X}"
            raise InvalidRequestError(f"Text must be valid Unicode, but holds the lone surrogate {found}.") from None
        if self.vocab_size <= 256 and data and max(data) + 1 >= self.vocab_size:
            raise InvalidRequestError(
                f"Text must consist of bytes below {self.vocab_size - 1}, all that a vocabulary of {self.vocab_size} ids "
                f"can encode, but holds the byte {max(data)}."
            )
        ids: list[int] = _build_encoder(self.vocab_size).encode(chunk)
        return ids

    def _withdraw_tail(self, ids: list[int]) -> int:
        """Removes the tokens that text after the chunk might change; returns the number of characters withdrawn.

        A match depends on no more bytes than the longest token has. The cut lies where a character begins.
        """
        tail: list[bytes] = []
        num_bytes = 0
        while num_bytes < self._longest or tail[-1][0] & 0xC0 == 0x80:
            tail.append(self._bytes[ids.pop()])
            num_bytes += len(tail[-1])
        return len(b"".join(reversed(tail)).decode())


@lru_cache
def _load_tables(vocab_size: int) -> tuple[list[str | None], list[bytes]]:
    """`WorldTokenizer.texts` and the same as bytes, for the ids that have an entry and end of text."""
    texts: list[str | None] = [""]
    tokens = [b""]
    with _VOCABULARY.open(encoding="utf-8", newline="\n") as lines:
        for token_id, line in enumerate(islice(lines, vocab_size - 1), start=END_OF_TEXT_ID + 1):
            number, _, rest = line.partition(" ")
            literal, _, length = rest.rpartition(" ")
            value = _parse_literal(literal)
            token = value.encode() if isinstance(value, str) else value
            if number != str(token_id) or int(length) != len(token):
                raise ConfigError(f"{_VOCABULARY} is damaged at token {token_id}; reinstall pyrwkv-tokenizer.")
            texts.append(value if isinstance(value, str) else _decode_whole(value))
            tokens.append(token)
    return texts, tokens


def _parse_literal(literal: str) -> str | bytes:
    """The value of a str or bytes literal. Text without escapes, 99 % of the file, needs no parser."""
    if "\\" not in literal and literal[:1] in _QUOTES and literal.count(literal[0]) == 2 and literal[0] == literal[-1]:
        return literal[1:-1]
    value: str | bytes = ast.literal_eval(literal)
    return value


def _decode_whole(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


@lru_cache
def _build_encoder(vocab_size: int) -> pyrwkv_tokenizer.WorldTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _VOCABULARY.name
        with _VOCABULARY.open("rb") as lines:
            path.write_bytes(b"".join(islice(lines, vocab_size - 1)))
        return pyrwkv_tokenizer.WorldTokenizer(str(path))
