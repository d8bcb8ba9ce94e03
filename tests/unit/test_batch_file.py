"""The files of a batch run: what is read, what is refused, and where an interrupted run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from albatross.cli.batch_file import BatchRequest, check_ids, open_output, read_done, read_requests, write_problem, write_row
from albatross.errors import InvalidRequestError


def line(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}} | fields


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in lines), encoding="utf-8")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_good_line_becomes_a_request(source: Path) -> None:
    (request,) = read_requests(write_lines(source, line("a", url="/v1/chat/completions", body={"messages": []})))
    assert request == BatchRequest(1, "a", "/v1/chat/completions", {"messages": []})


def test_empty_lines_a_byte_order_mark_and_windows_line_ends_are_no_mistakes(source: Path) -> None:
    source.write_bytes(b"\xef\xbb\xbf" + json.dumps(line("a")).encode() + b"\r\n\r\n" + json.dumps(line("b")).encode())
    found = [(request.number, request.custom_id, request.problem) for request in read_requests(source)]
    assert found == [(1, "a", None), (3, "b", None)]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "not valid JSON"),
        ('{"custom_id": "\\ud800"}', "not valid JSON"),
        ("[1]", "JSON object"),
        (line(custom_id=""), "custom_id"),
        (line(custom_id=7), "custom_id"),  # type: ignore[arg-type]
        (line(method="GET"), "method"),
        (line(url="/v1/embeddings"), "url"),
        (line(url=["/v1/completions"]), "url"),
        (line(body=[]), "body"),
        (line(body={"stream": True}), "stream"),
    ],
)
def test_a_bad_line_is_a_request_with_a_problem(source: Path, bad: Any, words: str) -> None:
    (request,) = read_requests(write_lines(source, bad))
    assert request.problem is not None
    assert request.problem.startswith("Line 1")
    assert words in request.problem


def test_repeated_ids_are_refused_with_both_lines(source: Path) -> None:
    write_lines(source, line("a"), line("b"), line("a"))
    with pytest.raises(InvalidRequestError, match="line 3: custom_id 'a' stands in line 1"):
        check_ids(source)


def test_lines_without_an_id_do_not_repeat_each_other(source: Path) -> None:
    assert len(check_ids(write_lines(source, "{", "{", line("a")))) == 3


def test_a_file_without_requests_is_refused(source: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no requests"):
        check_ids(write_lines(source, ""))


def test_a_missing_file_is_one_sentence(source: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"in\.jsonl cannot be read: No such file or directory\."):
        check_ids(source)


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        open_output(tmp_path / "missing" / "out.jsonl")


def test_rows_have_the_shape_of_openai_batches_and_are_flushed_at_once(results: Path) -> None:
    with open_output(results) as output:
        write_row(output, BatchRequest(1, "a"), 200, {"object": "text_completion"})
        write_problem(output, BatchRequest(2, None, problem="Line 2 is not valid JSON."))
        rows = [json.loads(row) for row in results.read_text().splitlines()]
    response = {"status_code": 200, "request_id": "req_batch_req_000001", "body": {"object": "text_completion"}}
    assert rows[0] == {"id": "batch_req_000001", "custom_id": "a", "response": response, "error": None}
    assert rows[1] == {
        "id": "batch_req_000002", "custom_id": None, "response": None,
        "error": {"code": "invalid_line", "message": "Line 2 is not valid JSON."},
    }


def test_done_lines_are_known_by_their_id_or_their_number(results: Path) -> None:
    with open_output(results) as output:
        write_row(output, BatchRequest(1, "a"), 200, {})
        write_problem(output, BatchRequest(2, None, problem="bad"))
    assert read_done(results) == {"a", "batch_req_000002"}


@pytest.mark.parametrize("num_bytes", [1, 9, 25, 60])
def test_a_half_written_last_row_is_cut_off(results: Path, num_bytes: int) -> None:
    with open_output(results) as output:
        write_row(output, BatchRequest(1, "a"), 200, {})
        whole = results.read_bytes()
        write_row(output, BatchRequest(2, "b"), 200, {})
    results.write_bytes(results.read_bytes()[: len(whole) + num_bytes])
    assert read_done(results) == {"a"}
    assert results.read_bytes() == whole


@pytest.mark.parametrize("foreign", ["my notes", "my notes\nmore\n", '{"custom_id": "a"}\n', '{"id": "another"', "[]\n"])
def test_a_file_that_is_no_result_is_refused_and_left_alone(results: Path, foreign: str) -> None:
    results.write_text(foreign)
    with pytest.raises(InvalidRequestError, match="line 1, is no result"):
        read_done(results)
    assert results.read_text() == foreign


def test_a_missing_output_means_nothing_is_done(results: Path) -> None:
    assert read_done(results) == set()
