"""The World vocabulary against its own file, read by a real parser, and encoding against the definition of greedy matching."""

import ast
import time
from functools import lru_cache
from pathlib import Path

import pyrwkv_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albatross.errors import ConfigError, InvalidRequestError
from albatross.tokenizer import WorldTokenizer

GOSLING_VOCAB_SIZE = 4096
SAMPLES = [
    "The quick brown fox jumps over the lazy dog.\n\nUser: hi\r\n\r\n\tprint('x')  # 3.14159",
    "今天是美好的一天。我们去公园。 これはペンです。 안녕하세요 Привет, мир! مرحبا بالعالم नमस्ते ภาษาไทย",
    "👨‍👩‍👧‍👦🎉🏳️‍🌈 \u200d e\u0301 \ufeff \uffff \U0010ffff \x00 \x7f \x85 \u2028",
    " " * 300 + "-" * 200 + "#" * 81 + "\n" * 40,
]
texts = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def world() -> WorldTokenizer:
    return WorldTokenizer()


@pytest.fixture(scope="module")
def gosling() -> WorldTokenizer:
    return WorldTokenizer(GOSLING_VOCAB_SIZE)


@pytest.fixture(scope="module")
def in_one() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()


@lru_cache
def ids_by_bytes(vocab_size: int) -> dict[bytes, int]:
    tokenizer = WorldTokenizer(vocab_size)
    return {tokenizer.token_bytes(i): i for i in range(1, vocab_size) if tokenizer.token_bytes(i)}


def greedy_encode(tokenizer: WorldTokenizer, text: str) -> list[int]:
    """The definition, by brute force: at each place the longest token that fits."""
    id_of = ids_by_bytes(tokenizer.vocab_size)
    data, ids = text.encode(), []
    while data:
        length = next(n for n in range(min(128, len(data)), 0, -1) if data[:n] in id_of)
        ids.append(id_of[data[:length]])
        data = data[length:]
    return ids


def test_every_token_is_what_the_vocabulary_file_says(world: WorldTokenizer) -> None:
    file = Path(pyrwkv_tokenizer.__file__).parent / "rwkv_vocab_v20230424.txt"
    lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    values = ast.literal_eval("[" + ",".join(line.split(" ", 1)[1].rsplit(" ", 1)[0] for line in lines) + "]")
    expected = [value if isinstance(value, bytes) else value.encode() for value in values]
    assert [world.token_bytes(i) for i in range(1, 65530)] == expected


def test_facts_of_the_vocabulary(world: WorldTokenizer) -> None:
    assert world.vocab_size == 65536
    assert len({world.token_bytes(i) for i in range(1, 65530)}) == 65529
    assert max(len(world.token_bytes(i)) for i in range(65536)) == 128
    assert all(world.token_bytes(byte + 1) == bytes([byte]) for byte in range(256))
    assert world.undefined_ids == tuple(range(65530, 65536))


def test_texts_hold_text_nothing_or_none(world: WorldTokenizer) -> None:
    assert world.texts[0] == ""
    assert world.texts[65530:] == [""] * 6
    assert sum(text is None for text in world.texts) == 486
    assert all(text is None or text.encode() == world.token_bytes(i) for i, text in enumerate(world.texts))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("\0", [1]),
        ("\n", [11]),
        ("\n\n", [261]),
        (" ", [33]),
        ("\r\n\r\n", [19244]),
        ("。\n\n", [28329, 11]),
        ("녕", [3266, 150]),
        ("안녕하세요", [18815, 3266, 150, 19052, 18777, 18862]),
        ("🎉", [3319, 143, 138]),
        ("ENDING", [40438]),
        ("Hello", [33155]),
        ("User:", [24281, 59]),
        ("Assistant:", [5585, 41693, 59]),
        ("Assistant: ", [5585, 41693, 59, 33]),
        (" <think></think", [295, 35762, 5439, 35762]),
        (" <think>\n</think", [295, 35762, 63, 11, 754, 35762]),
        ("\n\n\n", [3328]),
    ],
)
def test_known_texts_have_known_ids(world: WorldTokenizer, text: str, ids: list[int]) -> None:
    assert world.encode(text) == ids
    assert world.decode(ids) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_a_prefix_of_the_vocabulary_is_matched_greedily(gosling: WorldTokenizer, text: str) -> None:
    ids = gosling.encode(text)
    assert ids == greedy_encode(gosling, text)
    assert max(ids) < GOSLING_VOCAB_SIZE


@pytest.mark.parametrize("vocab_size", [257, 258, 300, 3319, 20_000, 65529, 65530, 65536, 70_000])
def test_any_vocabulary_size_is_matched_greedily(vocab_size: int) -> None:
    tokenizer = WorldTokenizer(vocab_size)
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert ids == greedy_encode(tokenizer, text)
        assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=30)
@given(text=texts)
def test_any_text_is_matched_greedily(world: WorldTokenizer, text: str) -> None:
    assert world.encode(text) == greedy_encode(world, text)


@settings(deadline=None, max_examples=200)
@given(text=texts)
def test_decoding_undoes_encoding(world: WorldTokenizer, gosling: WorldTokenizer, text: str) -> None:
    assert world.decode(world.encode(text)) == text
    assert gosling.decode(gosling.encode(text)) == text


@pytest.mark.parametrize("unit", ["word ", "-" * 79 + " ", "🎉", "今天是美好的一天 ", "a\n\n", " " * 127 + "x", "\u0301e👍🏽"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 61])
def test_a_text_of_many_pieces_encodes_as_in_one(
    world: WorldTokenizer, in_one: pyrwkv_tokenizer.RWKVTokenizer, unit: str, shift: int
) -> None:
    text = "x" * shift + unit * (150_000 // len(unit))
    pieces = list(world.encode_pieces(text))
    assert len(pieces) > 2
    assert [token_id for piece in pieces for token_id in piece] == world.encode(text) == in_one.encode(text)


def test_a_long_text_takes_time_in_proportion(world: WorldTokenizer) -> None:
    text = "".join(SAMPLES) * 200
    world.encode(text)  # builds the encoder
    start = time.perf_counter()
    world.encode(text)
    short_s = time.perf_counter() - start
    start = time.perf_counter()
    world.encode(text * 10)
    assert time.perf_counter() - start < 30 * short_s + 0.1


@pytest.mark.parametrize("text", ["\ud800", "hi \udfff", "x" * 100_000 + "\udc80"])
def test_a_lone_surrogate_is_refused(world: WorldTokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        world.encode(text)


def test_a_tiny_vocabulary_encodes_the_bytes_it_has() -> None:
    tokenizer = WorldTokenizer(100)
    assert tokenizer.encode("ab\n") == [98, 99, 11]
    with pytest.raises(InvalidRequestError, match=r"99.*100 ids.*122"):
        tokenizer.encode("abz")


@pytest.mark.parametrize("vocab_size", [0, -1])
def test_a_vocabulary_without_ids_is_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        WorldTokenizer(vocab_size)


def test_ids_without_an_entry_decode_to_nothing_and_keep_their_neighbours(world: WorldTokenizer) -> None:
    assert world.decode([33155, 65533, 33155]) == "HelloHello"
    assert world.decode([0, 33155, 0, 33155, 65529 + 1, 70_000, -1]) == "HelloHello"
    assert world.token_bytes(0) == world.token_bytes(65535) == world.token_bytes(1 << 40) == world.token_bytes(-1) == b""


def test_ids_at_or_above_the_vocabulary_size_decode_to_nothing(gosling: WorldTokenizer) -> None:
    assert gosling.undefined_ids == ()
    assert gosling.decode([105, 33155, 106]) == "hi"
    assert len(gosling.texts) == GOSLING_VOCAB_SIZE


def test_bytes_that_are_not_utf8_decode_to_replacement_marks(world: WorldTokenizer) -> None:
    assert world.decode_bytes([0x41 + 1, 0xE4 + 1, 0xBD + 1]) == b"A\xe4\xbd"
    assert world.decode([0x41 + 1, 0xE4 + 1, 0xBD + 1]) == "A\ufffd"
