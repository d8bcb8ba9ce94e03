"""A tiny source tree, and programs that stand in for CMake and ninja: what tests of the builder share."""

import json
import shutil
from pathlib import Path

from albatross.build.native import Listener, Options, Record, compile_library
from albatross.build.toolchain import Toolchain

ROOT = Path(__file__).parents[1]
STEP = "Building CUDA object CMakeFiles/rwkv7_state_fwd_fp16.dir/csrc/cuda/scale.cu.o"
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z12scale_kernelPf' for 'sm_90'
ptxas info    : Function properties for _Z12scale_kernelPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 488 bytes cmem[0]
ptxas info    : Compile time = 81.613 ms"""
INFO = {
    "library": "librwkv7_state_fwd_fp16.so",
    "stable_min": "2.10",
    "cuda": {"toolkit": "13.0.88", "cudart": "static", "driver_min": "580"},
    "arch": ["sm_90"],
    "ptx": [],
}
SOURCES = {
    "cuda/scale.cu": """\
__global__ void scale_kernel(float* x) { x[threadIdx.x] *= 2.0f; }
void scale(float* x) { scale_kernel<<<1, 32>>>(x); }
""",
    "op_list.h": "#define EACH(DO) \\\n  DO(scale)\n",
    "bindings.cpp": "void scale(float* x);\n",
    "classic/module.cpp": """\
#include <pybind11/pybind11.h>
PYBIND11_MODULE(rwkv7_state_fwd_fp16, m) { m.attr("lane") = "C"; }
""",
}
# Each writes to the file `calls` beside it when it was called, and fails if a file `fail` with its message lies there.
CMAKE = r"""#!/bin/bash
here=$(dirname "$0"); echo cmake >> "$here/calls"
[ -e "$here/fail-cmake" ] && { cat "$here/fail-cmake" >&2; exit 1; }
while [ "$1" != -B ]; do shift; done
touch "$2/build.ninja"; cp "$here/info.json" "$2/build_info.json"
"""
NINJA = r"""#!/bin/bash
here=$(dirname "$0"); echo ninja >> "$here/calls"
[ -e "$here/wait" ] && sleep "$(cat "$here/wait")"
[ -e librwkv7_state_fwd_fp16.so ] && { echo "[0/2] Re-checking globbed directories..."; echo "ninja: no work to do."; exit 0; }
echo "[1/2] STEP"
cat "$here/said"
[ -e "$here/fail-ninja" ] && { cat "$here/fail-ninja"; echo "ninja: build stopped: subcommand failed."; exit 1; }
printf '# ninja log v7\n10\t2510\t0\tCMakeFiles/rwkv7_state_fwd_fp16.dir/csrc/cuda/scale.cu.o\tabc\n' > .ninja_log
echo "[2/2] Linking CXX shared module librwkv7_state_fwd_fp16.so"
echo "library $$" > librwkv7_state_fwd_fp16.so
"""


def put_sources(root: Path) -> Path:
    """Sources as a wheel ships them, with one kernel that doubles numbers."""
    for name, text in SOURCES.items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("compat.cpp", "exports.map", "constants.h.in", "classic/exports.map"):
        shutil.copy(ROOT / "csrc" / name, root / "csrc" / name)
    shutil.copy(ROOT / "CMakeLists.txt", root)
    shutil.copy(ROOT / "python" / "albatross" / "constants.py", root)
    return root


def put_tools(folder: Path) -> Toolchain:
    """Programs that take a moment, not a minute; `folder` steers them and has what they were asked."""
    folder.mkdir(parents=True)
    nvcc = "#!/bin/bash\necho sm_80 sm_86 sm_90\n"
    for name, text in {"cmake": CMAKE, "ninja": NINJA.replace("STEP", STEP), "nvcc": nvcc}.items():
        executable(folder / name, text)
    (folder / "info.json").write_text(json.dumps(INFO))
    (folder / "said").write_text(PTXAS + "\nscale.cu(1): warning #177-D: it was declared but never used\n")
    return Toolchain(folder / "nvcc", "13.0.88", folder / "torch", "2.13.0+cpu", folder / "cmake", folder / "ninja")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Workshop:
    """Sources, and the programs that stand in, to build them with."""

    def __init__(self, parent: Path) -> None:
        self.root = put_sources(parent / "sources")
        self.tools = put_tools(parent / "tools")
        self.steering = parent / "tools"
        self.folder = parent / "cmake"
        self.target = parent / "out"

    def compile(self, options: Options | None = None, listener: Listener | None = None) -> Record:
        return compile_library(self.tools, self.root, self.folder, self.target, options or Options("9.0"), listener)

    def calls(self) -> list[str]:
        """The programs that were called, in order."""
        path = self.steering / "calls"
        return path.read_text().split() if path.exists() else []
