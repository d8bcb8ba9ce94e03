"""Which model a benchmark of the engine runs, and what it is asked. Knows names and shapes; loads no weights."""

import argparse

from albatross.config import DEMO_MODEL, SYNTHETIC_PREFIX, EngineConfig, ModelConfig
from albatross.models.checkpoint import open_checkpoint
from albatross.models.synth import SIZES

PROMPT = [24, 117, 11, 12, 256]  # ids that every vocabulary has


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="a checkpoint, 'demo', or the size of a random one, such as 1.5b")


def model_setting(name: str) -> str:
    """The engine's `model` setting for what the flag names."""
    return SYNTHETIC_PREFIX + name if name in SIZES else name


def model_config(name: str) -> ModelConfig:
    """The sizes of what the flag names."""
    return SIZES[name] if name in SIZES else open_checkpoint(EngineConfig(model=name).model_path).config
