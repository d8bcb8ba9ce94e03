"""What a raw ASGI handler needs and no more: headers, a bounded body, whole answers, and the request's id.

Knows nothing of generation. Called by the generation routes and by the outermost application.
"""

import re
import uuid
from collections.abc import Sequence
from http import HTTPStatus

from starlette.types import Receive, Scope, Send

from .errors import ApiError

Headers = Sequence[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def route_path(scope: Scope) -> str:
    """The path below the prefix under which a proxy serves this application."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def request_id_of(scope: Scope) -> str:
    """The client's X-Request-Id where it is a plain word, else a fresh one."""
    given = (header(scope, b"x-request-id") or b"").decode("latin-1")
    return given if is_request_id(given) else uuid.uuid4().hex


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too large, ClientDisconnected if the client left."""
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """One complete answer; `headers` without Content-Length."""
    length = () if status == HTTPStatus.NO_CONTENT else ((b"content-length", b"%d" % len(body)),)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"The body must be at most {max_bytes} bytes; send less, or raise max_body_bytes.", code="request_too_large"
    )
