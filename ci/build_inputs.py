"""Gets what a wheel is built with: interpreters, CUDA toolkits, torch's headers, and tools, each once, under build/.

Everything comes from this machine or from the package registry by pip, which never installs torch or what torch depends on.
Knows nothing of how a wheel is built. `build_matrix.py` calls it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Lock

from matrix import Machine, Matrix

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
# Of a wheel of torch: headers, version, and the libraries that the linker wants to see. The rest is hundreds of megabytes.
TORCH_PARTS = re.compile(r"torch/(include/.+|version\.py|lib/lib(torch|torch_cpu|c10)\.so)")
PACKAGED_NVCC = "nvidia/*/bin/nvcc"  # in the folder that the packages were installed to
DESCRIBE_PYTHON = """
import json, sys, sysconfig, venv
abi = "cp%d%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
print(json.dumps([abi, sysconfig.get_path("include")]))
"""


class InputProblem(Exception):
    """Something a build needs could not be had; the text says what and why."""


class Inputs:
    """The inputs of all cells, made when they are first asked for. Safe to call from several threads."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self._lock = Lock()
        self._nvccs = {_nvcc_version(path): path for path in _nvccs()}
        self._pythons = find_pythons({cell.python_abi for cell in matrix.cells.values()} - {"none"})

    def machine(self) -> Machine:
        """What this machine can build with, the package registry included."""
        packaged = {cuda for cuda, facts in self._matrix.cuda.items() if "packages" in facts}
        return Machine(host_platform(), frozenset(packaged | self._nvccs.keys()), frozenset(self._pythons))

    def compilers(self, cuda: str) -> str:
        """Which nvcc and C++ compiler a cell of that toolkit is built with, to tell whether they changed."""
        local = self._nvccs.get(cuda)
        nvcc = _version_of(local) if local else " ".join(self._matrix.cuda[cuda].get("packages", ()))
        return f"{nvcc}; {_version_of(Path('c++'))}"

    def nvcc(self, cuda: str) -> Path:
        """The compiler of that toolkit: the one on PATH, else the registry's."""
        with self._lock:
            if cuda in self._nvccs:
                return self._nvccs[cuda]
            folder = BUILD / "toolchains" / f"cu{cuda.replace('.', '')}"
            packages = self._matrix.cuda[cuda]["packages"]
            with _made_once(folder, packages) as is_missing:
                if is_missing:
                    _install_toolkit(folder, packages)
            (nvcc,) = folder.glob(PACKAGED_NVCC)
            return nvcc

    def torch(self, version: str) -> Path:
        """The folder of a torch package that has headers and libraries, and does not run."""
        facts = self._matrix.torch[version]
        # Headers and symbols are those of the release, the same for every Python.
        python_abi = host_abi() if host_abi() in facts["python"] else facts["python"][0]
        folder = BUILD / "torch" / f"{facts['release']}-{python_abi}"
        with self._lock, _made_once(folder, [facts["release"]]) as is_missing:
            if is_missing:
                _unpack_torch(facts["release"], python_abi, folder)
        return folder / "torch"

    def python(self, python_abi: str) -> Path:
        """An interpreter of that ABI with the matrix's tools; for "none" that of the running one."""
        python_abi = host_abi() if python_abi == "none" else python_abi
        folder = BUILD / "pythons" / python_abi
        interpreter = folder / "bin" / "python"
        base = self._pythons.get(python_abi) or Path(sys.executable)
        with self._lock, _made_once(folder, [str(base), *self._matrix.tools]) as is_missing:
            if is_missing:
                _run([str(base), "-m", "venv", "--without-pip", str(folder)])
                _pip("--python", str(interpreter), "install", *self._matrix.tools)
        return interpreter


def host_abi() -> str:
    return f"cp{sys.version_info[0]}{sys.version_info[1]}"


def host_platform() -> str:
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def find_pythons(wanted: Iterable[str]) -> dict[str, Path]:
    """The interpreters of these ABIs that have their headers: the running one, those on PATH, and pyenv's."""
    found: dict[str, Path] = {}
    for abi in sorted(wanted):
        for interpreter in _interpreters(f"{abi[2]}.{abi[3:]}"):
            if _has_headers(interpreter, abi):
                found[abi] = interpreter
                break
    return found


def _interpreters(version: str) -> Iterator[Path]:
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        yield Path(sys.executable)
    for folder in os.get_exec_path():
        path = Path(folder, f"python{version}")
        if os.access(path, os.X_OK):
            yield path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)


def _has_headers(interpreter: Path, abi: str) -> bool:
    try:
        done = subprocess.run([interpreter, "-c", DESCRIBE_PYTHON], capture_output=True, text=True, timeout=60)
        found, include = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False  # a launcher without an interpreter behind it, or one without the module venv
    return bool(found == abi and Path(include, "Python.h").is_file())


def _nvccs() -> Iterator[Path]:
    """The nvcc that the environment names, in the order that setup.py looks; the last one wins for a version."""
    homes = [f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    named = ["/usr/local/cuda/bin/nvcc", "nvcc", *homes, *filter(None, [os.environ.get("CUDACXX")])]
    yield from (Path(path) for path in map(shutil.which, named) if path)


def _nvcc_version(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", _version_of(nvcc))
    return found.group(1) if found else "unknown"


def _version_of(compiler: Path) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return "none"


def _install_toolkit(folder: Path, packages: Iterable[str]) -> None:
    _pip("install", "--no-deps", "--target", str(folder), *packages)
    nvcc = next(folder.glob(PACKAGED_NVCC), None)
    if nvcc is None:
        raise InputProblem(f"{', '.join(packages)} hold no nvcc: see manifest/matrix.toml.")
    home = nvcc.parents[1]
    for tool in [*home.glob("bin/*"), *home.glob("nvvm/bin/*")]:
        tool.chmod(0o755)  # pip drops the executable bit with --target


def _unpack_torch(release: str, python_abi: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    version = f"{python_abi[2]}.{python_abi[3:]}"
    platform = host_platform().replace("linux", "manylinux_2_28")
    target = ["--python-version", version, "--implementation", "cp", "--abi", python_abi, "--platform", platform]
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        _pip("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", *target, "--dest", downloads, f"torch=={release}")
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if TORCH_PARTS.fullmatch(name)])


@contextmanager
def _made_once(folder: Path, made_of: Iterable[str]) -> Iterator[bool]:
    """Whether the block must make the folder. A marker in it says what it was made of; it is written last."""
    marker = folder / ".made_of"
    digest = sha256("\n".join(made_of).encode()).hexdigest()
    is_missing = not marker.is_file() or marker.read_text() != digest
    if is_missing:
        shutil.rmtree(folder, ignore_errors=True)
    yield is_missing
    if is_missing:
        marker.write_text(digest)


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InputProblem(f"`{' '.join(command)}` failed: {last}")
