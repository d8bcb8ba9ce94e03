"""The two files of a batch run, in OpenAI's batch format: requests read line by line, results appended line by line.

Knows no engine. A line that is wrong in itself becomes a request with a `problem`, so that it gets a result row like any
other; only what makes the whole run meaningless (no file, repeated ids, a foreign output file) raises InvalidRequestError.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import orjson

from albatross.errors import InvalidRequestError

URLS = ("/v1/chat/completions", "/v1/completions")
_ID_PREFIX = "batch_req_"
_ROW_START = b'{"id":"' + _ID_PREFIX.encode()  # how every row that this file writes begins


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of the input. With a `problem`, url and body mean nothing."""

    number: int  # of the line, from 1
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] = {}
    problem: str | None = None

    @property
    def key(self) -> str:
        """What a later run knows this line by."""
        return self.custom_id if self.custom_id is not None else self.row_id

    @property
    def row_id(self) -> str:
        return f"{_ID_PREFIX}{self.number:06d}"


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file in order; empty lines are skipped."""
    for number, raw in _lines(path):
        yield _parse(number, raw)


def check_ids(path: Path) -> set[str]:
    """The keys of all lines. Raises InvalidRequestError if two lines share a custom_id, or if there is no line at all."""
    first_lines: dict[str, int] = {}
    for request in read_requests(path):
        if request.key in first_lines:
            raise InvalidRequestError(
                f"{path}, line {request.number}: custom_id {request.key!r} stands in line {first_lines[request.key]} already; "
                "give each line an id of its own.", "custom_id",
            )
        first_lines[request.key] = request.number
    if not first_lines:
        raise InvalidRequestError(f"{path} holds no requests; expected one JSON object a line.")
    return set(first_lines)


def read_done(path: Path) -> set[str]:
    """Keys of the results already in an output file; a half-written last line is cut off the file.

    Raises InvalidRequestError if the file holds anything but results, and leaves it as it was.
    """
    if not path.exists():
        return set()
    done, good_bytes = set(), 0
    for number, raw in enumerate(_open(path), 1):
        if not raw.endswith(b"\n"):
            if not _may_be_row(raw):
                raise _foreign(path, number)
            break
        done.add(_key_of_row(path, number, raw))
        good_bytes += len(raw)
    if good_bytes < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(good_bytes)
    return done


def open_output(path: Path) -> BinaryIO:
    """The output file, ready for rows to be appended. Raises InvalidRequestError if it cannot be written."""
    try:
        return path.open("ab")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}.") from None


def write_row(file: BinaryIO, request: BatchRequest, status: int, body: dict[str, Any]) -> None:
    """Appends what the API answered, whether success or an error body, and flushes."""
    _write(file, request, {"status_code": status, "request_id": f"req_{request.row_id}", "body": body}, None)


def write_problem(file: BinaryIO, request: BatchRequest) -> None:
    """Appends the row of a line that never reached the API."""
    _write(file, request, None, {"code": "invalid_line", "message": request.problem})


def _write(file: BinaryIO, request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
    row = {"id": request.row_id, "custom_id": request.custom_id, "response": response, "error": error}
    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    file.flush()


def _parse(number: int, raw: bytes) -> BatchRequest:
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return BatchRequest(number, None, problem=f"Line {number} is not valid JSON: {error}.")
    if not isinstance(line, dict):
        return BatchRequest(number, None, problem=f"Line {number} must be a JSON object.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchRequest(number, None, problem=f"Line {number} needs a custom_id, a string that is not empty.")
    problem = _problem(line)
    if problem is not None:
        return BatchRequest(number, custom_id, problem=f"Line {number}: {problem}")
    return BatchRequest(number, custom_id, line["url"], line["body"])


def _problem(line: dict[str, Any]) -> str | None:
    if line.get("method") != "POST":
        return f"method must be 'POST', but is {line.get('method')!r}."
    if line.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}, but is {line.get('url')!r}."
    if not isinstance(line.get("body"), dict):
        return "body must be a JSON object."
    if line["body"].get("stream"):
        return "stream must be false or absent in a batch."
    return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(_open(path), 1):
        text = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()  # a byte order mark is no mistake
        if text:
            yield number, text


def _open(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from None


def _key_of_row(path: Path, number: int, raw: bytes) -> str:
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise _foreign(path, number) from None
    if not isinstance(row, dict) or not {"id", "custom_id", "response", "error"} <= row.keys():
        raise _foreign(path, number)
    return str(row["custom_id"] if row["custom_id"] is not None else row["id"])


def _may_be_row(raw: bytes) -> bool:
    return raw.startswith(_ROW_START) or _ROW_START.startswith(raw)


def _foreign(path: Path, number: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path}, line {number}, is no result of a batch run; name another output file, or move this one away."
    )
