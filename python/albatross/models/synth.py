"""Random checkpoints with the shapes and statistics of the released RWKV-7 models: for benchmarks, tests and dry runs.

They speak nonsense at the speed of a real model: about 92 % of the squared ReLUs are zero, as in trained weights, and
decays cover their whole range. `albatross synth`, the benchmarks and the tests are the users.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from albatross.config import ModelConfig
from albatross.constants import WORLD_VOCAB_SIZE
from albatross.errors import ConfigError
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


def build_state_dict(size: str, device: str, seed: int = 0, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The tensors of one of SIZES by name, made on `device`; a seed gives the same weights on the same kind of device."""
    return dict(make_tensors(_config(size), device, seed, dtype))


def make_tensors(config: ModelConfig, device: str, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a checkpoint with the sizes of `config`, in the order and shapes of the official files."""
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = letter_sizes(config)
    for name, letters in expected_shapes(config.num_layers):
        shape = [sizes[letter] for letter in letters]
        if letters == "C" and not name.endswith((".weight", ".bias")):
            shape = [1, 1, *shape]
        yield name, _draw(name, torch.empty(shape, device=device, dtype=dtype), generator)


def _draw(name: str, out: Tensor, generator: torch.Generator) -> Tensor:
    """Fills one tensor: normals scaled by 1/sqrt(fan-in) where nothing else is said."""
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
