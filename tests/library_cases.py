"""A library's record, a machine that fits it, and a file that is no library: what tests of the choice among libraries share."""

import hashlib
import json
from pathlib import Path
from typing import Any

from albatross.ops._driver import Card
from albatross.ops._manifest import Build
from albatross.ops._selection import Context

LIBRARY_FILE = "librwkv7_state_fwd_fp16.so"
OPS = ("sample", "wkv7_prefill")
STABLE = Build(
    name="rwkv7_state_fwd_fp16",
    version="0.1.0",
    lane="S",
    platform="linux_x86_64",
    torch_abi="stable",
    torch_min="2.10",
    torch_max=None,
    torch_built_with="2.13.0+cpu",
    cuda_toolkit="13.0.88",
    driver_min="580",
    python_abi="none",
    arch=("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    ptx=("compute_120",),
    ops=OPS,
    source="a" * 64,
    sha256="d" * 64,
)
H200 = Card(0, "NVIDIA H200", (9, 0))
MACHINE = Context(
    version="0.1.0",
    source=None,
    ops=frozenset(OPS),
    platform="linux_x86_64",
    python_abi="cp312",
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    torch_hip=None,
    driver_cuda=(13, 0),
    cards=(H200,),
)


def put_library(folder: Path, content: bytes = b"not really a library", /, **changes: Any) -> Path:
    """A file with a record beside it that fits MACHINE, but for `changes` of its keys."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LIBRARY_FILE
    path.write_bytes(content)
    record = {
        "schema": 2,
        "name": STABLE.name,
        "version": STABLE.version,
        "lane": STABLE.lane,
        "library": LIBRARY_FILE,
        "platform": STABLE.platform,
        "torch": {"abi": "stable", "min": "2.10", "max": None, "built_with": "2.13.0+cpu"},
        "cuda": {"toolkit": STABLE.cuda_toolkit, "cudart": "static", "driver_min": STABLE.driver_min},
        "python_abi": STABLE.python_abi,
        "arch": ["sm_90"],
        "ptx": [],
        "ops": list(OPS),
        "source": STABLE.source,
        "sha256": hashlib.sha256(content).hexdigest(),
        "why": None,
    }
    (folder / "_build.json").write_text(json.dumps({**record, **changes}))
    return path
