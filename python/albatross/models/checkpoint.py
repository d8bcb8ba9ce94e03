"""Opens model files: `.pth` and `.safetensors`, told apart by their first bytes, memory-mapped, never executing anything in them.

Yields tensors one at a time in the type and on the device asked for, so that the host never holds a second copy of a
file. What the tensors mean is the business of `layout`; `rwkv7.load_model` is the user.
"""

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from albatross.config import ModelConfig
from albatross.errors import CheckpointError
from albatross.models.layout import MAX_LISTED, check_layout

_SNIFFED_BYTES = 1024
_GGML_MAGICS = (b"GGUF", b"lmgg", b"fmgg", b"tjgg")  # GGUF, and ggml, ggmf, ggjt as little-endian words
_LEGACY_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that opens files of torch before 1.6
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit
_UNPICKLED_GLOBAL = re.compile(r"(?:GLOBAL|global|class) `?([\w.]+)`?")


@dataclass
class Checkpoint:
    """An open model file: its sizes and its tensors, which stay in the file until they are taken."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    _noted: dict[str, tuple[torch.Tensor, float]] = field(default_factory=dict)

    def take(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A copy of one tensor, noted for `check_values`; nothing waits for the device."""
        stored = self.tensors[name]
        raw = stored.to(device)
        self.note(name, raw, dtype)
        return raw.to(dtype, copy=raw is stored)

    def note(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Remembers the largest magnitude of `tensor`, which is to be held in `dtype`."""
        low, high = tensor.aminmax()
        self._noted[name] = (torch.maximum(high, -low).float(), torch.finfo(dtype).max)

    def check_values(self) -> None:
        """Raises CheckpointError naming every tensor noted so far with a NaN, an infinity, or a value its type cannot hold."""
        if not self._noted:
            return
        magnitudes = torch.stack([magnitude for magnitude, _ in self._noted.values()]).tolist()
        faults = [
            f"{name} {'holds NaN or infinity' if not magnitude <= torch.finfo(torch.float32).max else f'reaches {magnitude:.4g}'}"
            for (name, (_, limit)), magnitude in zip(self._noted.items(), magnitudes, strict=True)
            if not magnitude <= limit
        ]
        if faults:
            more = f" and {len(faults) - MAX_LISTED} more" if len(faults) > MAX_LISTED else ""
            raise CheckpointError(
                f"{self.path} has weights that the engine's type cannot hold (float16 ends at 65504): "
                f"{', '.join(faults[:MAX_LISTED])}{more}; use dtype float32 if they are finite, else download the file again."
            )


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens an RWKV-7 model file and checks its layout; reads no weights yet.

    Raises CheckpointError, or its child UnsupportedModelError, with one sentence about what the file is instead.
    """
    tensors = _read_tensors(path)
    try:
        return Checkpoint(path, check_layout(tensors), tensors)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None


def _read_tensors(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise CheckpointError(f"{path} is a directory; give the model file inside it, a .pth or .safetensors.")
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}; give the path of an RWKV-7 .pth or .safetensors file.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    if head.startswith(b"PK\x03\x04"):
        return _read_torch_zip(path)
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER_BYTES:
        return _read_safetensors(path, size, int.from_bytes(head[:8], "little"))
    raise CheckpointError(f"{path} {_describe(head)}; expected an RWKV-7 model as .pth or .safetensors.")


def _describe(head: bytes) -> str:
    """What a file that is no model file seems to be, from its first bytes."""
    if not head:
        return "is empty"
    if head.startswith(_GGML_MAGICS):
        return "is a GGUF or ggml file, which Albatross does not read"
    if head.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the model itself; fetch it with 'git lfs pull'"
    if head.startswith(_LEGACY_TORCH_MAGIC):
        return "is in torch's legacy format from before torch 1.6; load it in torch and save it again"
    if head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL:
        return "is a bare pickle, which is not opened because it could run code"
    decoded = head.decode("utf-8", errors="ignore")
    text = decoded.lstrip("\ufeff \t\r\n")
    if re.match(r"<(!doctype|html|head|\?xml)", text, re.IGNORECASE):
        return "is a web page, not the model itself; the download went wrong"
    cut_bytes = len(head) - len(decoded.encode())  # of a last character that the first bytes do not hold whole
    if cut_bytes <= 3 and all(char.isprintable() or char in "\t\r\n" for char in text):
        return "is JSON, not a model" if text[:1] in ("{", "[") else "is a text file, not a model"
    return f"is of an unknown kind (it starts with the bytes {head[:8].hex(' ')})"


def _read_torch_zip(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        raise CheckpointError(f"{path} is cut short or damaged: its zip archive has no end; download it again.") from None
    if not any(entry.rpartition("/")[2] == "data.pkl" for entry in entries):
        raise CheckpointError(f"{path} is a zip archive without a torch state dict in it; expected a .pth written by torch.save.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = _UNPICKLED_GLOBAL.search(str(error))
        what = f" ({named[1]})" if named else ""
        raise CheckpointError(
            f"{path} holds Python objects other than tensors{what}; it was refused because loading it could run code."
        ) from None
    except (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise CheckpointError(f"{path} cannot be read as a torch file: {reason}.") from None
    return _as_state_dict(path, content)


def _as_state_dict(path: Path, content: Any) -> Mapping[str, torch.Tensor]:
    if not isinstance(content, dict) or not content:
        found = "an empty dict" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(f"{path} holds {found}; expected a state dict of tensors.")
    others = [f"{name!r}: {type(value).__name__}" for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{path} holds {len(others)} entries that are no tensors ({', '.join(others[:3])}); "
            "expected a plain state dict, so save the inner one alone."
        )
    return {str(name): tensor for name, tensor in content.items()}


def _read_safetensors(path: Path, size: int, header_size: int) -> Mapping[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + header_size + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is cut short or damaged: its header cannot be read; download it again.") from None
    if size < needed:
        raise CheckpointError(f"{path} is cut short: {size} bytes of {needed}; download it again.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _as_state_dict(path, {name: file.get_tensor(name) for name in header if name != "__metadata__"})
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {str(error).strip().rstrip('.')}.") from None
