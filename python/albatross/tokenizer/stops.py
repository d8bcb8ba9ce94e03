"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one.

Knows nothing of tokens; the output processor keeps one matcher per stream.
"""

import re
from collections.abc import Sequence

_HEAD_CHARS = 16  # how far the regex follows a stop string; longer ones are confirmed by comparison


class StopMatcher:
    """Ends the text at the stop string that is complete first; of those complete at the same character, the longest.

    The outcome is the same however the text is cut into pieces. Empty strings never match. A stop string is compared as
    text, character by character: "\\n\\n" does not match "\\r\\n\\r\\n". With `include_stop` the stop string is emitted too.
    """

    matched: str | None  # the stop string that ended the text

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        # A stop string that holds another one before its own last character can never be complete first.
        self._stops = [stop for stop in dict.fromkeys(stops) if stop and not any(s and s in stop[:-1] for s in stops)]
        self._include_stop = include_stop
        self._search = re.compile("|".join(map(_head_pattern, self._stops))).search if self._stops else None
        self._held = ""
        self.matched = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text to emit and the stop string that has ended it, if one has; then nothing more is emitted."""
        if self._search is None:
            return text, None
        if self.matched is not None:
            return "", self.matched
        text, self._held = self._held + text, ""
        start = 0
        while candidate := self._search(text, start):
            start = candidate.start()
            for stop in self._stops:
                if text.startswith(stop, start):
                    self.matched = stop
                    return text[:start] + (stop if self._include_stop else ""), stop
            num_left = len(text) - start
            if any(len(stop) > num_left and stop.startswith(text[start:]) for stop in self._stops):
                self._held = text[start:]
                return text[:start], None
            start += 1
        return text, None

    def flush(self) -> str:
        """The end of the text: returns what was held back."""
        held, self._held = self._held, ""
        return held


def _head_pattern(stop: str) -> str:
    """Matches the head of `stop`, or as much of it as the text ends with."""
    *head, last = map(re.escape, stop[:_HEAD_CHARS])
    return "".join(f"{char}(?:\\Z|" for char in head) + last + ")" * len(head)
