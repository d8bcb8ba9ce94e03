"""Random checkpoints with the shapes and statistics of the released RWKV-7 models: for benchmarks, tests and dry runs.

They speak nonsense at the speed of a real model: about 92 % of the squared ReLUs are zero, as in trained weights, and
decays cover their whole range. `albatross synth` writes them to a file; `rwkv7.load_model` makes them on the device, one
tensor at a time as it takes them, where the model's path is "synth:SIZE".
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from albatross.config import SYNTHETIC_PREFIX, ModelConfig
from albatross.constants import WORLD_VOCAB_SIZE
from albatross.errors import ConfigError
from albatross.models.checkpoint import Checkpoint
from albatross.models.layout import expected_shapes, letter_sizes
from albatross.models.memory import require_free

_CONSTANTS = {"a0": 0.0, "v0": 0.0, "k_k": 0.75, "k_a": 1.0}
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def _size(num_layers: int, hidden_size: int, w_rank: int, a_rank: int, v_rank: int, g_rank: int) -> ModelConfig:
    return ModelConfig(num_layers, hidden_size, 4 * hidden_size, WORLD_VOCAB_SIZE, w_rank, a_rank, v_rank, g_rank)


SIZES = {
    "0.1b": _size(12, 768, 64, 64, 32, 128),
    "0.4b": _size(24, 1024, 64, 64, 32, 128),
    "1.5b": _size(24, 2048, 96, 96, 64, 256),
    "2.9b": _size(32, 2560, 96, 96, 64, 320),
    "7.2b": _size(32, 4096, 128, 128, 96, 480),
    "13.3b": _size(61, 4096, 128, 128, 96, 480),
}


def write_checkpoint(
    size: str, path: Path, seed: int = 0, progress: Progress | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes a `.pth` of one of SIZES; an existing file is replaced, once the new one is whole.

    The weights are held in memory until they are written. Raises ConfigError for an unknown size or an unwritable path.
    """
    config = _config(size)
    sizes = letter_sizes(config)
    numel = sum(math.prod(sizes[letter] for letter in letters) for _, letters in expected_shapes(config.num_layers))
    total = numel * dtype.itemsize
    require_free(total, torch.device("cpu"), f"A checkpoint of size {size}", "take a smaller size or a larger machine")
    tensors: dict[str, Tensor] = {}
    done = 0
    for name, tensor in make_tensors(config, "cpu", seed, dtype):
        tensors[name] = tensor
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    part = path.with_name(path.name + ".part")
    try:
        torch.save(tensors, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {str(error).partition(chr(10))[0].rstrip('.')}.") from None


@dataclass
class SyntheticCheckpoint(Checkpoint):
    """A checkpoint without a file: `tensors` has shapes and types only, and `take` makes the values where they are wanted."""

    seed: int = 0

    def take(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        raw = _draw(name, torch.empty_like(self.tensors[name], device=device), self.seed)
        self.note(name, raw, dtype)
        return raw.to(dtype)


def open_synthetic(size: str, seed: int = 0, *, dtype: torch.dtype = torch.float16) -> SyntheticCheckpoint:
    """One of SIZES, its values in `dtype` before they are taken. Costs nothing until then; the host never holds it.

    Gives the weights that `write_checkpoint` writes if both draw in the same type on the same kind of device. Raises
    ConfigError for an unknown size.
    """
    config = _config(size)
    shapes = {name: torch.empty(shape, device="meta", dtype=dtype) for name, shape in _tensor_shapes(config)}
    return SyntheticCheckpoint(Path(f"{SYNTHETIC_PREFIX}{size}"), config, shapes, seed=seed)


def synthetic_size(path: Path) -> str | None:
    """The size that a path such as "synth:7.2b" stands for; None for the path of a file."""
    text = str(path)
    return text.removeprefix(SYNTHETIC_PREFIX) if text.startswith(SYNTHETIC_PREFIX) else None


def make_tensors(config: ModelConfig, device: str, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a checkpoint with the sizes of `config`, in the order and shapes of the official files.

    A seed gives the same weights on the same kind of device.
    """
    for name, shape in _tensor_shapes(config):
        yield name, _draw(name, torch.empty(shape, device=device, dtype=dtype), seed)


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, list[int]]]:
    sizes = letter_sizes(config)
    for name, letters in expected_shapes(config.num_layers):
        is_vector = letters == "C" and not name.endswith((".weight", ".bias"))
        yield name, [*([1, 1] if is_vector else []), *(sizes[letter] for letter in letters)]


def _draw(name: str, out: Tensor, seed: int) -> Tensor:
    """Fills one tensor: normals scaled by 1/sqrt(fan-in) where nothing else is said. Each has random numbers of its own, so
    that it does not matter which are made, or in what order."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator(device=out.device).manual_seed(int.from_bytes(digest, "little"))
    module, _, leaf = name.rpartition(".")
    width = out.shape[-1]
    if leaf in _CONSTANTS:
        return out.fill_(_CONSTANTS[leaf])
    if module.rpartition(".")[2].startswith("ln"):
        # A bias of one after ln2 and key rows of mean -2/C bring the squared ReLU's argument to -2 at a spread of 1.4.
        return out.fill_(1.0 if leaf == "weight" or module.endswith("ln2") else 0.0)
    if name.endswith("ffn.key.weight"):
        return out.normal_(-2 / width, width**-0.5, generator=generator)
    if leaf.startswith("x_"):
        return out.uniform_(0, 1, generator=generator)
    if leaf == "w0":
        return out.uniform_(-6.5, 2.5, generator=generator)  # decays from 0.999 to 0.57 a token
    if name == "emb.weight":
        return out.normal_(generator=generator)
    fan_in = width if leaf in ("weight", "r_k") else out.shape[0]  # LoRA matrices are stored [in, out], all others [out, in]
    return out.normal_(0, fan_in**-0.5, generator=generator)


def _config(size: str) -> ModelConfig:
    if size not in SIZES:
        raise ConfigError(f"There is no size {size!r}; choose one of {', '.join(SIZES)}.")
    return SIZES[size]
