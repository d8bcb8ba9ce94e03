"""Every failure a client can meet, as one OpenAI error body: `{"error": {"message", "type", "param", "code"}}`.

`to_api_error` maps any exception to an `ApiError`; nothing else in the server decides about statuses. Called by the
generation routes, by FastAPI's exception handlers and, for single lines, by batch processing.
"""

import math
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from albatross.errors import AlbatrossError, EngineDeadError, InvalidRequestError, QueueFullError

MODEL_NOT_FOUND = "model_not_found"
ENGINE_RETRY_S = 5.0  # a restarted engine is usually back within seconds


class ErrorDetail(BaseModel):
    """What went wrong; `code` is a word for programs, `param` the offending field."""

    model_config = ConfigDict(title="Error")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 or above, and of the last event of a broken stream."""

    model_config = ConfigDict(title="ErrorResponse")

    error: ErrorDetail


class ApiError(AlbatrossError):
    """An answer other than success. `retry_after_s` becomes Retry-After, `allow` the Allow header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)  # an enum member would show by its name in logs and labels
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return orjson.dumps(self.as_dict())

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode("latin-1")))
        return headers


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to any exception. What is not ours to explain becomes a 500 that names the request and no cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        status = HTTPStatus.NOT_FOUND if error.code == MODEL_NOT_FOUND else HTTPStatus.BAD_REQUEST
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after_s=ENGINE_RETRY_S)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        return ApiError(400, f"{where}: {first['msg']}.", param=where)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}.")
    return ApiError(500, f"The server failed on this request; its log holds the cause under {request_id}.", code="internal_error")


def unknown_path(path: str) -> ApiError:
    return ApiError(404, f"There is no {path[:200]} here; /openapi.json lists what there is.", code="not_found")


def wrong_method(method: str, path: str, allow: str) -> ApiError:
    return ApiError(405, f"{path[:200]} takes {allow}, not {method}.", code="method_not_allowed", allow=allow)
