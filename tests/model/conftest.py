"""A tiny random RWKV-7 of awkward sizes, and models loaded on the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from albatross.config import ModelConfig
from albatross.models.rwkv7 import RWKV7, load_model
from albatross.models.synth import make_tensors

TINY = ModelConfig(num_layers=2, hidden_size=192, ffn_size=320, vocab_size=97, w_rank=5, a_rank=7, v_rank=3, g_rank=11)

Load = Callable[..., RWKV7]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and a busy machine makes threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_weights() -> dict[str, torch.Tensor]:
    """No tensor is constant, so that none can be left out or exchanged for another unnoticed."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in make_tensors(TINY, "cpu", 1, torch.float32)
    }


@pytest.fixture(scope="session")
def tiny_path(tiny_weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    torch.save(tiny_weights, path)
    return path


@pytest.fixture(scope="session")
def load() -> Load:
    """`load_model` with the defaults of a CPU."""

    def load_with_defaults(path: Path, **overrides: str) -> RWKV7:
        settings = {"device": "cpu", "dtype": "float32", "state_dtype": "float32", "backend": "reference"} | overrides
        return load_model(path, **settings)

    return load_with_defaults


@pytest.fixture(scope="session")
def tiny(tiny_path: Path, load: Load) -> RWKV7:
    return load(tiny_path)
