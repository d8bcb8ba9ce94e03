"""From ids to text: characters, stop strings, counts and reasons, however the tokens come in."""

import pytest

from albatross.engine.messages import Finish, TokenLogprobs
from albatross.engine.output_processor import Choice, Delta
from albatross.tokenizer.world import WorldTokenizer

TOKENIZER = WorldTokenizer()


def read(ids: list[int], end: Finish | None, per_take: int, **options: object) -> tuple[str, Choice, list[Delta]]:
    """Pushes ids in groups of `per_take`, taking after each; the end comes with the last group."""
    choice = Choice(0, 1, TOKENIZER, **options)  # type: ignore[arg-type]
    deltas = []
    groups = [ids[i : i + per_take] for i in range(0, len(ids), per_take)] or [[]]
    for number, group in enumerate(groups):
        for token_id in group:
            choice.push(token_id, TokenLogprobs(-1.0, (), ()))
        if end is not None and number == len(groups) - 1:
            choice.end(end)
        delta = choice.take()
        if delta is not None:
            deltas.append(delta)
    return "".join(delta.text for delta in deltas), choice, deltas


LENGTH = Finish(1, "length")


@pytest.mark.parametrize("per_take", [1, 2, 100])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([18815, 3266, 150, 19052, 18777, 18862], "안녕하세요"),
        ([3319, 143, 138], "🎉"),
        (TOKENIZER.encode("👨‍👩‍👧 family"), "👨‍👩‍👧 family"),
        ([33155, 65533, 33155], "HelloHello"),
        ([3319], "\ufffd"),
    ],
)
def test_only_whole_characters_leave(ids: list[int], text: str, per_take: int) -> None:
    found, _, deltas = read(ids, LENGTH, per_take)
    assert found == text
    assert all("\ufffd" not in delta.text for delta in deltas[:-1])


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    _, _, deltas = read([3319, 143, 138], None, 1)
    assert [delta.text for delta in deltas] == ["", "", "🎉"]


@pytest.mark.parametrize("per_take", [1, 2, 100])
@pytest.mark.parametrize(
    ("stop", "ids", "text", "num_tokens"),
    [
        (["\n\n"], [28329, 11, 33155], "。", 2),
        (["\n\n"], [33155, 3328, 33155], "Hello", 2),
        (["END"], [40438], "", 1),
        (["ab", "b"], TOKENIZER.encode("xab"), "x", len(TOKENIZER.encode("xab"))),
    ],
)
def test_a_stop_string_cuts_the_text_and_what_came_after(
    stop: list[str], ids: list[int], text: str, num_tokens: int, per_take: int
) -> None:
    aborted: list[int] = []
    found, choice, deltas = read(ids, None, per_take, stop=stop, abort=aborted.append)
    assert found == text
    assert (choice.finish_reason, choice.stop_reason in stop) == ("stop", True)
    assert choice.num_tokens == num_tokens
    assert sum(len(delta.token_ids) for delta in deltas) == num_tokens
    assert aborted == [1]
    assert choice.take() is None


def test_text_held_for_a_stop_is_sent_when_it_fails_and_at_the_end() -> None:
    pieces = [TOKENIZER.encode(piece) for piece in ("DEF", "G", "X", "DE")]
    choice = Choice(0, 1, TOKENIZER, stop=["DEFGHIJ"])
    texts = []
    for ids in pieces:
        for token_id in ids:
            choice.push(token_id)
        delta = choice.take()
        texts.append(delta.text if delta else None)
    assert texts == ["", "", "DEFGX", ""]
    choice.end(LENGTH)
    last = choice.take()
    assert last is not None
    assert (last.text, last.finish_reason) == ("DE", "length")


def test_a_stop_string_can_be_kept() -> None:
    found, choice, _ = read(TOKENIZER.encode("one END two"), None, 1, stop=["END"], include_stop=True)
    assert found == "one END"
    assert choice.finish_reason == "stop"


def test_min_tokens_lets_a_stop_string_pass() -> None:
    found, choice, _ = read([33155, 261, 33155, 261], LENGTH, 1, stop=["\n\n"], min_tokens=2)
    assert found == "Hello\n\nHello"
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 4)


@pytest.mark.parametrize("per_take", [1, 100])
def test_the_id_that_ended_the_stream_is_counted_but_no_text(per_take: int) -> None:
    found, choice, _ = read([33155, 33155], Finish(1, "stop", stop_token_id=33155), per_take)
    assert found == "Hello"
    assert (choice.finish_reason, choice.stop_reason, choice.num_tokens) == ("stop", 33155, 2)


def test_logprobs_stay_parallel_to_the_ids() -> None:
    _, _, deltas = read([33155, 11, 11, 33155], LENGTH, 3, stop=["\n\n"], wants_logprobs=True)
    assert [(len(delta.token_ids), len(delta.logprobs or [])) for delta in deltas] == [(3, 3)]


def test_an_error_ends_the_choice_with_its_text() -> None:
    found, choice, deltas = read([33155], Finish(1, "error", error="lost"), 1)
    assert (found, choice.finish_reason, choice.error) == ("Hello", "error", "lost")
    assert deltas[-1].finish_reason == "error"


def test_the_first_end_counts() -> None:
    choice = Choice(0, 1, TOKENIZER)
    choice.end(Finish(1, "abort"))
    choice.end(Finish(1, "error", error="late"))
    delta = choice.take()
    assert delta is not None
    assert delta.finish_reason == "abort"
