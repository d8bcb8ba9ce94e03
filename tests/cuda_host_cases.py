"""Builds CUDA kernels for this processor, with the emulator of tests/unit/cuda_host in the place of CUDA, and calls them. Knows
nothing of what they should compute.
"""

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tmix_cases import Tensors, bounds

from albatross import constants

ROOT = Path(__file__).parents[1]
HOST = ROOT / "tests" / "unit" / "cuda_host"
FLAGS = ["-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-g1", "-w"]
# Each access of a kernel calls the emulator, whose functions stand where the sanitizer's library would.
WATCHED = ["-Og", "-fsanitize=thread", "-fno-strict-aliasing", "-x", "c++"]
ORDERS = ("round robin", "reversed", "random", "first warps", "last warps")  # as emulator.h has them
ROOMS = {4: 99 * 1024, 8: 227 * 1024}  # what an RTX 4090 and an H100 give a block, by the number of producers that then run


def missing_tool() -> str | None:
    """Why nothing can be built here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulator's fibers are written for Linux on x86-64"
    for tool in ("g++", "addr2line"):
        if shutil.which(tool) is None:
            return f"needs {tool}, which was not found"
    probe = ["g++", "-x", "c++", "-fsyntax-only", "-"]
    has_halves = subprocess.run(probe, input="_Float16 number;", text=True, capture_output=True, timeout=60).returncode == 0
    return None if has_halves else "needs a g++ that knows _Float16, which came with release 12"


def build_library(folder: Path, kernels: list[Path]) -> Path:
    """A library of these kernels and of the emulator. The headers of csrc/cuda are copied, and those of the same name in
    cuda_host/cuda take their place.
    """
    headers = folder / "cuda"
    shutil.copytree(ROOT / "csrc" / "cuda", headers)
    shutil.copytree(HOST / "cuda", headers, dirs_exist_ok=True)
    template = (ROOT / "csrc" / "constants.h.in").read_text()
    (headers / "constants.h").write_text(re.sub(r"@(\w+)@", lambda match: str(getattr(constants, match[1])), template))
    sources = [*HOST.glob("*.cpp"), *kernels]
    compilers = []
    for source in sources:
        if source.suffix == ".cu":
            shutil.copy(source, headers)  # beside its headers, where a compiler looks first
            flags = [*WATCHED, headers / source.name]
        else:
            flags = ["-O1", source]
        command = ["g++", *FLAGS, f"-I{HOST}", f"-I{headers}", "-o", folder / f"{source.stem}.o", "-c", *flags]
        compilers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for compiler in compilers:
        _, said = compiler.communicate(timeout=110)
        assert compiler.returncode == 0, said
    library = folder / "library.so"
    # The emulator comes first: of an inline function that both have, the one that is not watched is linked.
    objects = [folder / f"{source.stem}.o" for source in sources]
    link = ["g++", "-shared", "-Wl,--no-undefined", *objects, "-o", library, "-ldl"]
    subprocess.run(link, check=True, timeout=60)
    return library


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class PrefillParams(ctypes.Structure):
    """TmixPrefillParams of csrc/cuda/tmix.h."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("state_stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("state_dtype", ctypes.c_int),
        *((name, Rows) for name in ("k", "v", "w", "a", "v_gate", "v_first", "r", "g")),
        *((name, ctypes.c_void_p) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_weight", "ln_bias")),
        *((name, ctypes.c_void_p) for name in ("slots", "cu_seqlens", "out")),
        ("out_stride", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_tokens", "num_rows", "num_heads")),
    )


class HostKernels:
    """Kernels on the emulator; they raise RuntimeError with what they did wrong."""

    def __init__(self, folder: Path) -> None:
        self._path = build_library(folder, [ROOT / "csrc" / "cuda" / "tmix_prefill.cu", HOST / "small_kernels.cu"])
        self._library = ctypes.CDLL(str(self._path))
        for name in ("emu_tmix_prefill", "emu_small_kernel", "emu_conflicts"):
            getattr(self._library, name).restype = ctypes.c_char_p

    def set_options(self, order: str = "round robin", seed: int = 0, *, counts_banks: bool = False) -> None:
        """How the kernels run that are called next."""
        self._library.emu_set_options(ORDERS.index(order), ctypes.c_uint64(seed), counts_banks)

    def small_kernel(self, name: str, *, is_broken: bool) -> None:
        """One of small_kernels.cu."""
        raise_error(self._library.emu_small_kernel(name.encode(), is_broken))

    def tmix_prefill(
        self,
        pool: torch.Tensor,
        tensors: Tensors,
        lengths: list[int],
        slots: list[int],
        out: torch.Tensor,
        num_producers: int = 8,
        num_blocks: int = 1,
        segments: torch.Tensor | None = None,
    ) -> None:
        """As the op: pool [S, H, 64, 64], out [T, C] and segments are written. num_blocks: that the card holds at once."""
        places, ends = (torch.tensor(x, dtype=torch.int32) for x in (slots, bounds(lengths)))
        given: Tensors = {**tensors, "state": pool, "slots": places, "cu_seqlens": ends, "out": out, "segments": segments}
        params = PrefillParams()
        for name, kind in PrefillParams._fields_:
            x = given.get(name)
            if x is not None:
                setattr(params, name, Rows(x.data_ptr(), x.stride(0)) if kind is Rows else x.data_ptr())
        params.state_stride, params.num_slots, params.num_heads = pool.stride(0), pool.shape[0], pool.shape[1]
        params.state_dtype = (torch.float16, torch.float32).index(pool.dtype)
        params.num_segments = 0 if segments is None else len(segments)
        params.out_stride, params.num_tokens, params.num_rows = out.stride(0), out.shape[0], len(slots)
        size = ctypes.c_size_t(ctypes.sizeof(params))
        raise_error(self._library.emu_tmix_prefill(ctypes.byref(params), size, ROOMS[num_producers], num_blocks))

    def num_segments(self, lengths: list[int], room: int) -> list[int]:
        """Into how many each of these rows is split."""
        chunks = [-(-length // 16) for length in lengths]
        return [self._library.emu_num_segments(own, sum(chunks), ctypes.c_int64(room)) for own in chunks]

    def conflicts(self) -> dict[str, int]:
        """Passes of shared memory that were too many, by the function that asked for them; forgets them."""
        found: dict[str, int] = {}
        for line in self._library.emu_conflicts().decode().splitlines():
            offset, _, _, passes = line.split()
            function = self._function_at(int(offset, 16) - 1)  # the place is where the access goes on
            found[function] = found.get(function, 0) + int(passes)
        self._library.emu_forget_conflicts()
        return found

    def _function_at(self, offset: int) -> str:
        command = ["addr2line", "--demangle", "--functions", "--inlines", "--exe", self._path, hex(offset)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        frames = zip(lines[::2], lines[1::2], strict=True)  # from the innermost outwards
        inlined = {path.name for path in (HOST / "cuda").iterdir()}
        function = next(function for function, place in frames if Path(place.split(":")[0]).name not in inlined)
        return re.sub(r"[<(].*", "", function).split("::")[-1]


def raise_error(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
