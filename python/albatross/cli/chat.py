"""`albatross chat`: a conversation in the terminal, with the engine in this process.

Each turn renders the whole conversation again and reads it from its start. Ctrl-C stops an answer, Ctrl-D leaves.
"""

import select
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from albatross.cli.options import SamplingFlags
from albatross.cli.terminal import interruptible, load_llm, load_profile, notes, print_error
from albatross.config import EngineConfig
from albatross.errors import AlbatrossError
from albatross.sampling_params import SamplingParams
from albatross.tokenizer.chat import AnswerTrimmer, ChatMessage, render_chat

if TYPE_CHECKING:
    from albatross.llm import LLM

HELP = """/reset  forget the conversation
/help   show this list
/quit   leave (or Ctrl-D)
Ctrl-C  stop an answer
Text pasted with several lines is one message; a line that ends in \\ goes on in the next."""
PASTE_GAP_S = 0.03  # lines of one paste arrive together; nobody types the next line this soon


class Conversation:
    """The turns so far, and the model that answers."""

    def __init__(self, llm: "LLM", params: SamplingParams, stop: tuple[str, ...], system: str | None) -> None:
        self._llm, self._params, self._stop = llm, params, stop
        self._opening = [ChatMessage("system", system)] if system else []
        self.reset()

    def reset(self) -> None:
        self._turns = list(self._opening)

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces. What was said until the iterator is closed stays in the conversation; a failed turn does not."""
        question = ChatMessage("user", text)
        trimmer, answer = AnswerTrimmer(), ""
        try:
            with closing(self._llm.stream(render_chat([*self._turns, question]), self._params, stop=self._stop)) as pieces:
                for piece in map(trimmer.feed, pieces):
                    answer += piece
                    yield piece
        finally:
            if answer:
                self._turns += [question, ChatMessage("assistant", answer)]


def chat(engine: EngineConfig, sampling: SamplingFlags, system: str | None) -> None:
    """Reads messages from standard input until its end; answers go to standard output, everything else to standard error."""
    profile = load_profile(engine)
    params = sampling.over(dict(profile.chat_sampling))
    conversation = Conversation(load_llm(engine), params, profile.chat_stop, system)
    notes.print(f"[bold]{engine.model_name}[/] is ready. /help lists the commands, Ctrl-D leaves.")
    read = _reader()
    while True:
        try:
            text = read().strip()
        except KeyboardInterrupt:
            notes.print("\nPress Ctrl-D to leave.")
            continue
        except EOFError:
            notes.print()
            return
        if text == "/quit":
            return
        _handle(conversation, text)


def _handle(conversation: Conversation, text: str) -> None:
    if not text:
        return
    if text == "/reset":
        conversation.reset()
        notes.print("The conversation is forgotten.")
    elif text == "/help":
        notes.print(HELP, markup=False)
    elif text.startswith("/") and " " not in text and "\n" not in text:
        notes.print(f"There is no {text}; /help lists the commands.", markup=False)
    else:
        _show_answer(conversation, text)


def _show_answer(conversation: Conversation, text: str) -> None:
    try:
        with interruptible() as interrupted, closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                if interrupted.is_set():
                    break
        sys.stdout.write("\n\n")
        sys.stdout.flush()
    except AlbatrossError as error:
        print_error(str(error))


def _reader() -> Callable[[], str]:
    """Reads one message: a line, or what was pasted together. Raises EOFError at the end of input."""
    if not sys.stdin.isatty():
        return _read_line
    try:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    except ImportError:
        notes.print("Line editing is not available: this Python has no readline.")
    return _read_message


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _read_message() -> str:
    lines = [input("> ")]
    try:
        while lines[-1].endswith("\\") or _more_is_waiting():
            lines.append(input("  "))
    except EOFError:
        notes.print()  # the paste ended with Ctrl-D: what was read so far is the message
    return "\n".join(line.removesuffix("\\") for line in lines)


def _more_is_waiting() -> bool:
    if sys.platform == "win32":  # select takes no console there; a paste needs the backslash
        return False
    return bool(select.select([sys.stdin], [], [], PASTE_GAP_S)[0])
