"""The checks of one finished wheel. Each returns findings: what was looked at, whether it is good, and what was seen.

`verify_wheel.py` chooses and shows them. They need binutils and auditwheel, `loaded` an environment of `torch_envs`; none
needs a card.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import check_library
import torch_envs
from build_inputs import BUILD
from evidence import Check, minor
from matrix import Matrix, MatrixError, cell_of_record
from torch_envs import EnvironmentProblem, TorchEnvironment
from wheel_file import Wheel, name_problems, record_problems, requirement_problems

DEFAULT_TORCHES = ("2.13.0", "2.14.1")  # what lane S is loaded in; pip takes a build for the CPU where it is offered one
LOAD_LIMIT_S = 300
ALL_FOUND = "every symbol found"
KNOWN_ANSWER = Path(__file__).with_name("known_answer.py")


@dataclass(frozen=True)
class Finding:
    """One row of the table. `level` and `environment` are set where it is evidence for manifest/checks.json."""

    subject: str
    is_good: bool
    text: str
    level: str | None = None
    environment: TorchEnvironment | None = None
    machine: str = "cpu"
    arch: str | None = None
    schemas: tuple[tuple[str, str], ...] = ()


def check_archive(wheel: Wheel) -> Finding:
    found = name_problems(wheel) + requirement_problems(wheel) + record_problems(wheel.path)
    return _finding("names, RECORD, digests", found, f"{wheel.size_bytes / 1e6:.1f} MB, sha256 {wheel.sha256[:12]}")


def check_platform(wheel: Wheel) -> Finding:
    """auditwheel must find no symbol newer, and no library more, than the platform in the wheel's name allows."""
    subject = "platform by auditwheel"
    command = [_auditwheel(), "-m", "auditwheel", "show", "--json", str(wheel.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_LIMIT_S)
    if done.returncode:
        return Finding(subject, False, torch_envs.last_line(done.stderr))
    told = json.loads(done.stdout)
    problem = platform_problem(wheel, told["sym_tag"], set(told["external_libs"]))
    return _finding(subject, [problem] if problem else [], f"{told['sym_tag']} or later")


def _auditwheel() -> str:
    """An interpreter that has auditwheel: this one, or one that the wheels were built with."""
    built_with = sorted((BUILD / "pythons").glob("*/bin/python"))
    return sys.executable if find_spec("auditwheel") or not built_with else str(built_with[0])


def platform_problem(wheel: Wheel, symbol_tag: str, libraries: set[str]) -> str | None:
    if not wheel.platforms[0].startswith("manylinux"):
        return f"It is for {wheel.platforms[0]}, which promises nothing to other machines: repair it with auditwheel."
    if not symbol_tag.startswith("manylinux") or _glibc(symbol_tag) > _glibc(wheel.platforms[0]):
        return f"Its symbols need {symbol_tag}, but its name says {wheel.platforms[0]}."
    foreign = libraries - check_library.TORCH_LIBRARIES[wheel.build["lane"]]
    return f"It needs libraries that a machine may lack: {', '.join(sorted(foreign))}." if foreign else None


def check_library_file(wheel: Wheel, library: Path) -> Iterator[Finding]:
    """Symbols, needed libraries and code of the wheel's library, which was unpacked with its record beside it."""
    needed = sorted(check_library.needed_libraries(library) - check_library.SYSTEM_LIBRARIES)
    yield _finding("symbols, NEEDED", check_library.symbol_problems(library, wheel.build), f"of others only {', '.join(needed)}")
    found = check_library.code_problems(library, wheel.build)
    held = {*wheel.build["arch"], *wheel.build["ptx"]}
    tools = "fatbin and cuobjdump" if check_library.find_cuobjdump() else "fatbin alone: cuobjdump is not installed"
    yield _finding("machine code, PTX", found, f"{_listed(held)} ({tools})")


def check_asked(wheel: Wheel, matrix: Matrix) -> Finding:
    """The matrix must want this wheel, under this label and with this code."""
    try:
        cell = cell_of_record(matrix, wheel.build)
    except MatrixError as error:
        return Finding("what the matrix asks", False, str(error))
    held, asked = ({*side} for side in (wheel.build["arch"] + wheel.build["ptx"], cell.arch + cell.ptx))
    found = [f"It holds {_listed(held)}, but the matrix asks for {_listed(asked)}."] if held != asked else []
    if wheel.label != cell.label:
        found.append(f"Its version is {wheel.version}, expected the label {cell.label}.")
    return _finding("what the matrix asks", found, cell.key)


def torches_of(wheel: Wheel, asked: list[str]) -> list[str]:
    """The torches to load a wheel in: those asked for as far as it is for them, else the usual ones."""
    build = wheel.build
    if build["torch"]["max"] is None:
        return asked or list(DEFAULT_TORCHES)
    fitting = [name for name in asked if Path(name).is_file() or minor(name) == build["torch"]["max"]]
    return fitting if asked else [build["torch"]["built_with"].partition("+")[0]]


def check_link(wheel: Wheel, library: Path, folder: Path) -> Finding | None:
    """Look for all symbols in a torch that was unpacked to build with (`build_inputs`); None if the wheel is not for that one."""
    version, abi = torch_envs.version_of(folder), folder.parent.name.rpartition("-")[2]
    if not is_for(wheel, version) or wheel.build["python_abi"] not in ("none", abi):
        return None
    missing = check_library.torch_problems(library, folder)
    environment = TorchEnvironment(Path(), folder, version, abi, (), ())
    return Finding(f"torch {version}: link", not missing, " ".join(missing) or ALL_FOUND, "link-checked", environment)


def is_for(wheel: Wheel, version: str) -> bool:
    """Whether the wheel claims to work in that version of torch."""
    torch, found = wheel.build["torch"], _numbers(minor(version))
    return _numbers(torch["min"]) <= found and (torch["max"] is None or found <= _numbers(torch["max"]))


def check_in_torch(wheel: Wheel, library: Path, name: str) -> Iterator[Finding]:
    """Link-check and load in one torch, by its version or an interpreter that has it."""
    abi = torch_envs.host_abi() if wheel.build["python_abi"] == "none" else wheel.build["python_abi"]
    try:
        environment = torch_envs.get_environment(name, abi)
    except EnvironmentProblem as error:
        yield Finding(f"torch {name}", False, f"There is no environment for it: {error}")
        return
    subject = f"torch {environment.version}, {environment.python_abi}"
    if shutil.which("nm"):  # a machine that only runs may lack binutils; opening the library asks for the same symbols
        missing = check_library.torch_problems(library, environment.torch)
        yield Finding(f"{subject}: link", not missing, " ".join(missing) or ALL_FOUND, "link-checked", environment)
    try:
        yield load(wheel, environment, f"{subject}: load")
    except EnvironmentProblem as error:
        yield Finding(f"{subject}: load", False, str(error), "loaded", environment)


def load(wheel: Wheel, environment: TorchEnvironment, subject: str) -> Finding:
    """Install the wheel without its dependencies into an empty environment over that torch, open it and ask known answers."""
    with tempfile.TemporaryDirectory() as folder:
        python = torch_envs.fresh_environment(environment, Path(folder) / "env")
        torch_envs.pip(python, "--no-deps", str(wheel.path))
        command = [str(python), "-W", "ignore", str(KNOWN_ANSWER), json.dumps(wheel.build["ops"])]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ALBATROSS_", "PYTHON"))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_LIMIT_S, env=inherited, cwd=folder)
    try:
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        reason = torch_envs.last_line(done.stderr) or f"It ended with code {done.returncode}."
        return Finding(subject, False, reason, "loaded", environment)
    done_well = f"{report['level']} ({report['machine']}): {len(report['ops'])} ops, known answer"
    return Finding(
        subject, not report["problems"], " ".join(report["problems"]) or done_well, report["level"], environment,
        report["machine"], report["arch"], tuple(sorted(report["ops"].items())),
    )


def check_schemas(findings: list[Finding]) -> Iterator[Finding]:
    """The ops must have the same schemas in every torch."""
    loaded = [finding for finding in findings if finding.schemas]
    if len(loaded) > 1:
        is_same = len({finding.schemas for finding in loaded}) == 1
        yield Finding("op schemas", is_same, f"{'the same' if is_same else 'not the same'} in {len(loaded)} environments")


def evidence_of(wheel: Wheel, finding: Finding, date: str, what: str) -> Check | None:
    """The entry of checks.json that a finding is worth."""
    if finding.environment is None or finding.level is None or wheel.library_sha256 is None:
        return None
    torch, python = finding.environment.version, finding.environment.python_abi
    return Check(wheel.library_sha256, torch, python, finding.machine, finding.arch, finding.level, date, what)


def _finding(subject: str, problems: list[str], text: str) -> Finding:
    return Finding(subject, not problems, " ".join(problems) or text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _glibc(platform: str) -> tuple[int, ...]:
    """(2, 28) of "manylinux_2_28_x86_64"."""
    aliases = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    found = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return tuple(map(int, found.groups())) if found else aliases.get(platform.partition("_")[0], (99,))
