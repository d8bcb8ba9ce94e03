"""Chat messages to the prompt text RWKV-7 models are trained on, and the first space off their answer.

The only place that knows roles and turn labels; knows nothing of tokens or of an API's message format. Source of the
template: RWKV7-G1x-templates.txt of RWKV-LM.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from albatross.errors import InvalidRequestError

_LABELS = {
    "system": "System: ",
    "developer": "System: ",
    "user": "User: ",
    "assistant": "Assistant: ",
    "tool": "User: Function output:\n",
    "function": "User: Function output:\n",
}
_ANSWER = "Assistant:"  # no space after it: the model's first token brings its own
_BLANK_LINES = re.compile(r"\n{2,}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. role: system, developer, user, assistant, tool or function."""

    role: str
    content: str


def render_chat(messages: Sequence[ChatMessage], *, clean: bool = True) -> str:
    """The prompt that asks for the next answer, or for the rest of the last message if that is the assistant's.

    With `clean`, white space around a text and blank lines inside it are removed from all but the assistant's turns, as in
    training; this also keeps a text from forging a turn, so turn it off only for text that is trusted. The assistant's
    turns lose the white space around them and nothing else. Raises InvalidRequestError for no message or an unknown role.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, but is empty.", "messages")
    turns = [_render_turn(index, message, clean) for index, message in enumerate(messages)]
    if messages[-1].role != "assistant":
        turns.append(_ANSWER)
    return "\n\n".join(turns)


def begins_answer(messages: Sequence[ChatMessage]) -> bool:
    """Whether the space a model writes first belongs to the template and not to the answer's text.

    It does in a fresh turn, and in a continued one whose text ended in white space, which the prompt does not carry.
    """
    last = messages[-1]
    return last.role != "assistant" or last.content.rstrip() != last.content or not last.content


class AnswerTrimmer:
    """Takes exactly one leading space off an answer that arrives in pieces."""

    def __init__(self) -> None:
        self._has_begun = False

    def feed(self, text: str) -> str:
        if self._has_begun or not text:
            return text
        self._has_begun = True
        return text.removeprefix(" ")


def _render_turn(index: int, message: ChatMessage, clean: bool) -> str:
    label = _LABELS.get(message.role)
    if label is None:
        raise InvalidRequestError(
            f"A message's role must be one of {', '.join(_LABELS)}, but is {message.role!r}.", f"messages[{index}].role"
        )
    text = message.content
    if message.role == "assistant":
        text = text.strip()
    elif clean:
        text = _BLANK_LINES.sub("\n", text.replace("\r\n", "\n")).strip()
    return label + text if text else label.rstrip()
