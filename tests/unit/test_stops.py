"""The stop-string matcher against a naive one that looks at the whole text after every character."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albatross.tokenizer import IncrementalDecoder, StopMatcher, WorldTokenizer

alphabet = st.text(st.sampled_from("ab\n(é"), max_size=6)


@pytest.fixture(scope="module")
def world() -> WorldTokenizer:
    return WorldTokenizer()


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    """All that is emitted for `pieces`, and the stop string found."""
    matcher = StopMatcher(stops, include_stop)
    emitted = ""
    for piece in pieces:
        text, matched = matcher.feed(piece)
        emitted += text
        if matched is not None:
            assert matcher.matched == matched
            return emitted, matched
    return emitted + matcher.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first character that completes a stop string ends the text; the longest such stop is the match."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def naive_held(stops: list[str], text: str) -> str:
    """The longest end of `text` that begins a stop string which no other stop string in it could forestall."""
    possible = [stop for stop in stops if stop and naive(stops, stop) == ("", stop)]
    ends = [text[-n:] for n in range(len(text), 0, -1)]
    return next((end for end in ends if any(stop.startswith(end) and stop != end for stop in possible)), "")


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything\n\n") == ("anything\n\n", None)
    assert matcher.flush() == ""


def test_a_stop_over_several_pieces_is_never_shown() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == ("", "DEFGHIJ")


def test_what_turns_out_not_to_be_a_stop_is_shown() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "X"]) == ("DEFGX", None)


def test_what_is_held_at_the_end_is_shown() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.feed("abcDE") == ("abc", None)
    assert matcher.flush() == "DE"
    assert matcher.flush() == ""


def test_of_stops_complete_at_one_character_the_longest_matches() -> None:
    assert run(["ab", "b"], ["xab"]) == ("x", "ab")
    assert run(["b", "ab"], ["xa", "b"]) == ("x", "ab")


def test_a_stop_complete_earlier_wins_over_one_begun_earlier() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["abcd", "bc"], ["xab", "cd"]) == ("xa", "bc")
    assert run(["ab", "abc"], ["xabc"]) == ("x", "ab")


def test_the_stop_can_be_shown() -> None:
    assert run(["END"], ["the E", "NDING"], include_stop=True) == ("the END", "END")


def test_nothing_is_emitted_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.feed("axb") == ("a", "x")
    assert matcher.feed("more") == ("", "x")
    assert matcher.flush() == ""


def test_text_is_held_only_while_a_stop_can_still_follow() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("one\n") == ("one", None)
    assert matcher.feed("two\n\n") == ("\ntwo", None)
    assert matcher.feed("\nUs") == ("\n", None)
    assert matcher.feed("age") == ("\n\nUsage", None)


def test_an_empty_stop_never_matches() -> None:
    assert run([""], ["abc"]) == ("abc", None)
    assert run(["", "c"], ["abc"]) == ("ab", "c")


def test_characters_special_to_patterns_are_literal() -> None:
    assert run([".*", "(?", "[a]", "\\Z", "$"], ["a b", "c [a", "] $"]) == ("a bc ", "[a]")


@pytest.mark.parametrize("length", [15, 16, 17, 18, 100, 20_000])
def test_stops_of_any_length_are_found(length: int) -> None:
    stop = "a" * (length - 1) + "b"
    pieces = ["x", "a" * 7, "a" * (length - 8), "b", "after"]
    assert run([stop], pieces) == ("x", stop)
    assert run([stop], ["x" + "a" * length + "bc"]) == ("xa", stop)
    assert run([stop], ["a" * (length - 1), "c"]) == ("a" * (length - 1) + "c", None)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [([28329, 11, 33155], "。"), ([33155, 3328, 33155], "Hello"), ([33155, 3336], "Hello "), ([33155, 11, 11], "Hello")],
)
def test_a_blank_line_stops_in_whatever_tokens_it_comes(world: WorldTokenizer, ids: list[int], shown: str) -> None:
    decoder = IncrementalDecoder(world)
    assert run(["\n\n"], [decoder.feed([token_id]) for token_id in ids]) == (shown, "\n\n")


def test_a_stop_inside_one_token_stops(world: WorldTokenizer) -> None:
    assert run(["END"], [world.decode([40438])]) == ("", "END")


def test_a_blank_line_of_carriage_returns_is_another_text(world: WorldTokenizer) -> None:
    assert run(["\n\n"], [world.decode([19244])]) == ("\r\n\r\n", None)
    assert run(["\r\n\r\n"], ["a\r\n", "\r", "\nb"]) == ("a", "\r\n\r\n")


@settings(deadline=None, max_examples=500)
@given(stops=st.lists(alphabet, max_size=4), pieces=st.lists(alphabet, max_size=8))
def test_any_text_in_any_pieces_equals_the_definition(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@settings(deadline=None, max_examples=500)
@given(stops=st.lists(alphabet, min_size=1, max_size=4), pieces=st.lists(alphabet, max_size=8))
def test_exactly_what_may_become_a_stop_is_held(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    fed = emitted = ""
    for piece in pieces:
        fed += piece
        text, matched = matcher.feed(piece)
        emitted += text
        if matched is not None:
            return
        assert fed[len(emitted) :] == naive_held(stops, fed)


@settings(deadline=None, max_examples=100)
@given(stops=st.lists(alphabet, max_size=4), text=alphabet)
def test_a_shown_stop_adds_exactly_itself(stops: list[str], text: str) -> None:
    hidden, matched = run(stops, list(text))
    assert run(stops, list(text), include_stop=True) == (hidden + (matched or ""), matched)
    assert re.fullmatch(re.escape(hidden + (matched or "")) + r"[\s\S]*", text)
