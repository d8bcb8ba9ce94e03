"""Environments with one torch and nothing else, kept under build/envs: where finished wheels are loaded.

A CUDA build of torch gets only the CUDA packages that its libraries need to open. `fresh_environment` lays an empty environment
over one of them, so that a wheel is installed as a user would install it, and none is left behind. Knows nothing of wheels.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "envs"
# What torch asks for but does not need to be imported and to open its libraries; the last two come by name or as extras.
UNNEEDED = re.compile(r"triton|pytorch-triton|setuptools|cuda-bindings|nvidia-(cusolver|nvtx)(-.*)?")
UNNEEDED_EXTRAS = {"cusolver", "nvtx"}
INSTALL_LIMIT_S = 1800
DESCRIBE = """
import json, sys, sysconfig
from importlib import metadata, util
from pathlib import Path
torch = Path(util.find_spec("torch").origin).parent
abi = "cp%d%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "")
sites = [path for path in sys.path if path.endswith("-packages")]
print(json.dumps([str(torch), abi, sites, metadata.requires("torch") or []]))
"""


class EnvironmentProblem(Exception):
    """There is no such environment, for the reason in the text."""


@dataclass(frozen=True)
class TorchEnvironment:
    """An interpreter that has torch."""

    python: Path
    torch: Path  # folder of the torch package
    version: str  # of torch, as in "2.14.1+cu130"
    python_abi: str  # as in "cp311"
    sites: tuple[str, ...]  # folders in which its packages lie
    requirements: tuple[str, ...]  # of torch


def host_abi() -> str:
    return f"cp{sys.version_info[0]}{sys.version_info[1]}"


def get_environment(name: str, python_abi: str) -> TorchEnvironment:
    """`name` is a version of torch, as in 2.14.1 or 2.13.0+cpu, or the path of an interpreter that has one.

    Makes the environment where it is missing. Raises EnvironmentProblem where that is not possible.
    """
    if Path(name).is_file():
        return describe(Path(name))
    if "/" in name:
        raise EnvironmentProblem(f"{name} does not exist: name an interpreter that has torch, or a version of torch.")
    folder = ENVIRONMENTS / f"torch-{name}-{python_abi}"
    python, mark = folder / "bin" / "python", folder / "complete"
    if not mark.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        make_environment(folder, find_interpreter(python_abi))
        pip(python, "--no-deps", f"torch=={name}")
        pip(python, *needed_packages(describe(python)))
        mark.touch()
    return describe(python)


@cache
def describe(python: Path) -> TorchEnvironment:
    """Ask an interpreter for its torch, without importing that."""
    done = subprocess.run([python, "-c", DESCRIBE], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise EnvironmentProblem(f"{python} has no torch: {last_line(done.stderr)}")
    torch, abi, sites, requirements = json.loads(done.stdout)
    return TorchEnvironment(python, Path(torch), version_of(Path(torch)), abi, tuple(sites), tuple(requirements))


def version_of(torch: Path) -> str:
    """What a torch package says of itself: with its CUDA version, which the registry's wheels do not have in their name."""
    (version,) = re.findall(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return str(version)


def needed_packages(environment: TorchEnvironment) -> list[str]:
    """The requirements of a torch without those that it opens without, as pip takes them."""
    digits = environment.python_abi[2:].rstrip("t")
    markers = {"python_version": f"{digits[0]}.{digits[1:]}", "extra": ""}
    needed = []
    for requirement in map(Requirement, environment.requirements):
        if UNNEEDED.fullmatch(requirement.name) or (requirement.marker and not requirement.marker.evaluate(markers)):
            continue
        requirement.marker = None
        requirement.extras -= UNNEEDED_EXTRAS
        needed.append(str(requirement))
    return needed


def find_interpreter(python_abi: str) -> Path:
    """A Python of this ABI on PATH or among pyenv's. Raises EnvironmentProblem."""
    if python_abi == host_abi():
        return Path(sys.executable)
    version = f"{python_abi[2]}.{python_abi[3:]}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    name = f"python{version}"
    on_path = shutil.which(name)
    found = [Path(on_path)] if on_path else []
    for path in found + sorted(root.glob(f"versions/{version.rstrip('t')}.*/bin/{name}"), reverse=True):
        if subprocess.run([path, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return path
    raise EnvironmentProblem(f"There is no Python {version} on this machine: install one so that {name} is on PATH.")


def make_environment(folder: Path, interpreter: Path) -> Path:
    """An empty virtual environment without pip; returns its interpreter."""
    run([interpreter, "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def fresh_environment(base: TorchEnvironment, folder: Path) -> Path:
    """An empty environment that sees the packages of `base` after its own; returns its interpreter."""
    python = make_environment(folder, base.python)
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(site) / "torch_environment.pth").write_text("\n".join(base.sites) + "\n")
    return python


def pip(python: Path, *arguments: str) -> None:
    """Install into another interpreter's environment by this one's pip."""
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: list[str | Path]) -> str:
    """Standard output. Raises EnvironmentProblem with the last line of what a failing command said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"{Path(command[0]).name} took longer than {INSTALL_LIMIT_S} s.") from error
    if done.returncode:
        raise EnvironmentProblem(last_line(done.stderr) or f"{' '.join(map(str, command))} failed.")
    return done.stdout


def last_line(text: str) -> str:
    """The last line that says something, which is where Python and pip put the cause."""
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith(("[notice]", "WARNING"))]
    return lines[-1] if lines else ""
