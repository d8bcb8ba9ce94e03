"""Albatross: an RWKV-7 inference engine. Importing it loads no torch, touches no GPU and opens no native library."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from albatross.config import EngineConfig
    from albatross.llm import LLM
    from albatross.sampling_params import SamplingParams

_LAZY = {"LLM": "albatross.llm", "EngineConfig": "albatross.config", "SamplingParams": "albatross.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'albatross' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
