"""Uvicorn's httptools protocol, with the one answer that no application sees in the shape of all others."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError


class JsonErrorProtocol(HttpToolsProtocol):
    """Answers bytes that are not HTTP with an OpenAI error body."""

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, "What was sent is not valid HTTP.", code="invalid_http").body()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % len(body) + body)
        self.transport.close()
