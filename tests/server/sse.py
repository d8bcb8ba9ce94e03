"""Reads an event stream the way a strict client does."""

import json
from collections.abc import Iterable
from typing import Any


def events(text: str) -> list[str]:
    """The data of each event, in order. Comments are dropped; anything else that is not an event is an error."""
    assert text.endswith("\n\n"), "the stream ends inside an event"
    found = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block, block
        found.append(block.removeprefix("data: "))
    return found


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    *data, last = events(text)
    assert last == "[DONE]"
    return [json.loads(item) for item in data]


def joined(parts: Iterable[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice."""
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
