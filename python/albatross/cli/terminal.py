"""What the commands share at the terminal: notes on standard error, loading a model, and an interrupt that only stops an answer.

Standard output is left to the result itself, so that every command can be piped.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from albatross.config import EngineConfig, ModelProfile

if TYPE_CHECKING:
    from albatross.llm import LLM

notes = Console(stderr=True, highlight=False)


def print_error(text: str) -> None:
    notes.print("[bold red]Error:[/]", end=" ")
    notes.print(text, style="red", markup=False, soft_wrap=True)


def load_llm(engine: EngineConfig) -> "LLM":
    """The model in this process. Raises CheckpointError, NativeLibraryError and ConfigError."""
    with notes.status(f"Loading {engine.model_name}"):
        from albatross.llm import LLM

        return LLM(**engine.model_dump())


def load_profile(engine: EngineConfig) -> ModelProfile:
    """The profile beside the checkpoint, or the defaults. Raises ConfigError if it is wrong in any way."""
    from albatross_server.plan import check_profile

    profile = engine.load_profile()
    check_profile(profile)
    return profile


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C sets the event; a second one raises KeyboardInterrupt as usual.

    An engine in this process is so never interrupted in the middle of a step.
    """
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
