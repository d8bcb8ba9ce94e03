"""`albatross chat` at a real (pseudo) terminal: pasting, interrupting and leaving. The model is a fake that echoes slowly."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

DRIVER = """
import signal, sys, time
from albatross.cli import chat
from albatross.cli.options import SamplingFlags
from albatross.config import EngineConfig

class Echo:
    def stream(self, prompt, params, *, stop=()):
        text = prompt.rpartition("User: ")[2].removesuffix("\\n\\nAssistant:")
        if text != "for ever":
            yield f"[{text!r}]"
        while text == "for ever":
            time.sleep(0.01)
            yield "."

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background pass it on as ignored
chat.load_llm = lambda engine: Echo()
chat.chat(EngineConfig(), SamplingFlags({}), None)
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
TIMEOUT_S = 20


class Terminal:
    """A program at a pseudo-terminal, and all it has shown."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come; shown: {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += ESCAPES.sub("", os.read(self.master, 65536).decode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    opened.wait_for("is ready")
    opened.wait_for("> ")
    yield opened
    opened.close()


def test_pasted_lines_are_one_message(terminal: Terminal) -> None:
    terminal.type("first line\nsecond line\nthird line\n")
    terminal.wait_for(r"['first line\nsecond line\nthird line']")


def test_a_bracketed_paste_is_one_message(terminal: Terminal) -> None:
    terminal.type("\x1b[200~first line\nsecond line\x1b[201~\r")
    terminal.wait_for(r"['first line\nsecond line']")


def test_a_backslash_carries_the_message_on(terminal: Terminal) -> None:
    terminal.type("first line\\\n")
    time.sleep(0.2)  # longer than a paste takes, as a person would
    terminal.type("second line\n")
    terminal.wait_for(r"['first line\nsecond line']")


def test_an_interrupt_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.type("for ever\n")
    terminal.wait_for("...")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for(".\n\n> ")
    terminal.type("hello\n")
    terminal.wait_for("['hello']")


def test_an_interrupt_at_the_prompt_drops_the_line(terminal: Terminal) -> None:
    terminal.type("half a li")
    terminal.wait_for("half a li")
    time.sleep(0.2)  # readline sees a signal only while it waits for a key, which it does not yet as it shows one
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("Press Ctrl-D to leave.\n> ")
    terminal.type("hello\n")
    terminal.wait_for("['hello']")


@pytest.mark.parametrize("farewell", ["\x04", "/quit\n"])
def test_ctrl_d_and_quit_leave(terminal: Terminal, farewell: str) -> None:
    terminal.type(farewell)
    assert terminal.process.wait(timeout=TIMEOUT_S) == 0
