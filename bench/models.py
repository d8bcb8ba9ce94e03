"""Which model a benchmark of the engine runs, and what it is asked. Knows names only; loads nothing."""

import argparse

from albatross.config import DEMO_MODEL, SYNTHETIC_PREFIX
from albatross.models.synth import SIZES

PROMPT = [24, 117, 11, 12, 256]  # ids that every vocabulary has


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="a checkpoint, 'demo', or the size of a random one, such as 1.5b")


def model_setting(name: str) -> str:
    """The engine's `model` setting for what the flag names."""
    return SYNTHETIC_PREFIX + name if name in SIZES else name
