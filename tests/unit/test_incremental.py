"""Streaming decode against decoding all at once: same text, whatever the tokens and however they are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albatross.tokenizer import IncrementalDecoder, WorldTokenizer

HANGUL_IDS = [18815, 3266, 150, 19052, 18777, 18862]
PARTY_IDS = [3319, 143, 138]
FAMILY = "👨\u200d👩\u200d👧\u200d👦"


@pytest.fixture(scope="module")
def world() -> WorldTokenizer:
    return WorldTokenizer()


@pytest.fixture(scope="module")
def gosling() -> WorldTokenizer:
    return WorldTokenizer(4096)


def feed_one_by_one(tokenizer: WorldTokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.feed([token_id]) for token_id in ids] + [decoder.flush()]


def test_characters_split_over_tokens_come_whole(world: WorldTokenizer) -> None:
    pieces = feed_one_by_one(world, HANGUL_IDS)
    assert "".join(pieces) == "안녕하세요"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_token(world: WorldTokenizer) -> None:
    assert feed_one_by_one(world, PARTY_IDS) == ["", "", "🎉", ""]


@pytest.mark.parametrize("text", [FAMILY, "据新华社🎉 e\u0301 \u200d\ufeff", "Привет, мир!\n\n"])
def test_streamed_text_equals_the_text(world: WorldTokenizer, gosling: WorldTokenizer, text: str) -> None:
    for tokenizer in (world, gosling):
        assert "".join(feed_one_by_one(tokenizer, tokenizer.encode(text))) == text


def test_ids_without_text_add_nothing_and_break_nothing(world: WorldTokenizer) -> None:
    assert feed_one_by_one(world, [33155, 65533, 0, 33155]) == ["Hello", "", "", "Hello", ""]
    assert "".join(feed_one_by_one(world, [3319, 65533, 143, 0, 138])) == "🎉"


def test_an_incomplete_character_at_the_end_becomes_one_mark(world: WorldTokenizer) -> None:
    assert feed_one_by_one(world, [33155, *PARTY_IDS[:2]]) == ["Hello", "", "", "\ufffd"]


def test_bytes_that_cannot_be_completed_become_a_mark_at_once(world: WorldTokenizer) -> None:
    assert feed_one_by_one(world, [3319, 33155, 0xFF + 1, 33155]) == ["", "\ufffdHello", "\ufffd", "Hello", ""]


def test_a_decoder_is_usable_after_flush(world: WorldTokenizer) -> None:
    decoder = IncrementalDecoder(world)
    decoder.feed(PARTY_IDS[:2])
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.feed([33155, *PARTY_IDS]) == "Hello🎉"


@settings(deadline=None, max_examples=300)
@given(cuts=st.lists(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 4095)), max_size=6), max_size=12))
def test_any_ids_cut_anywhere_give_the_whole_decode(gosling: WorldTokenizer, cuts: list[list[int]]) -> None:
    decoder = IncrementalDecoder(gosling)
    streamed = "".join([decoder.feed(ids) for ids in cuts]) + decoder.flush()
    assert streamed == gosling.decode([token_id for ids in cuts for token_id in ids])


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_valid_text_never_shows_a_mark(gosling: WorldTokenizer, text: str) -> None:
    pieces = feed_one_by_one(gosling, gosling.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
