"""`albatross generate`: one prompt in, the text alone out, written as it is drawn."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing

from albatross.cli.options import SamplingFlags
from albatross.cli.terminal import interruptible, load_llm, load_profile
from albatross.config import EngineConfig
from albatross.errors import InvalidRequestError
from albatross.tokenizer.chat import AnswerTrimmer, ChatMessage, render_chat


def generate(engine: EngineConfig, sampling: SamplingFlags, prompt: str | None, *, is_chat: bool, stop: Sequence[str]) -> None:
    """Writes the continuation to standard output, with a line end after it. Ctrl-C ends it early, but cleanly."""
    text = read_standard_input() if prompt is None or prompt == "-" else prompt
    trim: Callable[[str], str] = str
    if is_chat:
        profile = load_profile(engine)
        text = render_chat([ChatMessage("user", text)])
        params, stops = sampling.over(dict(profile.chat_sampling)), (*profile.chat_stop, *stop)
        trim = AnswerTrimmer().feed
    else:
        params, stops = sampling.over({}), tuple(stop)
    llm = load_llm(engine)
    with interruptible() as interrupted, closing(llm.stream(text, params, stop=stops)) as pieces:
        for piece in pieces:
            sys.stdout.write(trim(piece))
            sys.stdout.flush()
            if interrupted.is_set():
                break
    sys.stdout.write("\n")


def read_standard_input() -> str:
    """All of standard input without its last line end, which echo and editors add."""
    if sys.stdin.isatty():
        raise InvalidRequestError("A prompt is needed: give it as an argument, or pipe a text in.", "prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        raise InvalidRequestError(f"The text on standard input is not UTF-8 ({where}); convert it first.", "prompt") from None
