"""ci/build_inputs.py: interpreters, toolkits and torch's headers, found or fetched once. A folder stands in for the registry."""

import json
import os
import zipfile
from pathlib import Path

import build_inputs
import pytest
from build_inputs import InputProblem, Inputs, find_pythons, host_abi
from matrix import read_matrix


def write_interpreter(path: Path, abi: str, include: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{json.dumps([abi, str(include)])}'\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_counts_if_it_runs_and_has_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    launcher = tmp_path / "shims" / "python3.97"
    write_interpreter(launcher, "cp397", include).write_text("#!/bin/sh\nexit 127\n")
    write_interpreter(tmp_path / "bare" / "python3.98", "cp398", tmp_path)
    write_interpreter(tmp_path / "free" / "python3.99", "cp399t", include)
    kept = write_interpreter(tmp_path / "pyenv" / "versions" / "3.97.1" / "bin" / "python3.97", "cp397", include)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("shims", "bare", "free")))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert find_pythons({"cp397", "cp398", "cp399"}) == {"cp397": kept}


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only source of packages, and a build folder beside it."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(build_inputs, "BUILD", tmp_path / "build")
    monkeypatch.setattr(build_inputs, "_nvccs", lambda: iter(()))
    monkeypatch.setattr(build_inputs, "find_pythons", lambda wanted: {})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, name: str, version: str, tag: str, files: dict[str, str]) -> Path:
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    head = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: unheard-of\n"}
    head["WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**files, **{f"{info}/{key}": value for key, value in head.items()}}.items():
            archive.writestr(member, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*files, *(f"{info}/{key}" for key in head)]))
    return path


def test_the_compilers_of_a_toolkit_are_told_by_version(downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(build_inputs, "_nvccs", lambda: iter([nvcc]))
    inputs = Inputs(read_matrix())
    assert "12.8" in inputs.machine().toolkits
    assert inputs.nvcc("12.8") == nvcc
    assert "V12.8.93" in inputs.compilers("12.8")
    assert "nvidia-cuda-nvcc==13.0.88" in inputs.compilers("13.0")


def test_of_torch_only_headers_and_link_libraries_are_unpacked_once(downloads: Path) -> None:
    release = read_matrix().torch["2.13"]["release"]
    platform = build_inputs.host_platform().replace("linux", "manylinux_2_28")
    names = ("version.py", "include/ATen/Tensor.h", "lib/libtorch_cpu.so", "lib/libtorch_cuda.so", "nn/functional.py")
    files = {f"torch/{name}": name for name in names}
    found = write_wheel(downloads, "torch", release, f"{host_abi()}-{host_abi()}-{platform}", files)
    folder = Inputs(read_matrix()).torch("2.13")
    kept = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert kept == {"version.py", "include/ATen/Tensor.h", "lib/libtorch_cpu.so"}
    found.unlink()
    assert Inputs(read_matrix()).torch("2.13") == folder


def test_a_torch_that_cannot_be_downloaded_is_told_and_tried_again(downloads: Path) -> None:
    for _ in range(2):
        with pytest.raises(InputProblem, match=r"pip .* download .*torch==2\.13\.0` failed: .*torch==2\.13\.0"):
            Inputs(read_matrix()).torch("2.13")


def write_toolkit(folder: Path, files: dict[str, str]) -> None:
    """The registry's packages of CUDA 13.2, the files in the one that is to have nvcc."""
    for requirement in read_matrix().cuda["13.2"]["packages"]:
        name, version = requirement.replace("-", "_").split("==")
        write_wheel(folder, name, version, "py3-none-any", files if name == "nvidia_cuda_nvcc" else {})


def test_a_toolkit_comes_from_the_registry_where_there_is_none_and_can_be_run(downloads: Path) -> None:
    write_toolkit(downloads, {f"nvidia/cu13/{name}": name for name in ("bin/nvcc", "nvvm/bin/cicc")})
    inputs = Inputs(read_matrix())
    assert "13.2" in inputs.machine().toolkits
    home = inputs.nvcc("13.2").parents[1]
    assert os.access(home / "bin" / "nvcc", os.X_OK)
    assert os.access(home / "nvvm" / "bin" / "cicc", os.X_OK)
    assert Inputs(read_matrix()).nvcc("13.2") == home / "bin" / "nvcc"


def test_packages_without_an_nvcc_are_told_as_what_they_are(downloads: Path) -> None:
    write_toolkit(downloads, {"nvidia/cu13/bin/ptxas": ""})
    for _ in range(2):
        with pytest.raises(InputProblem, match=r"nvidia-cuda-nvcc==13\.2\.86, .* hold no nvcc: see manifest/matrix\.toml"):
            Inputs(read_matrix()).nvcc("13.2")
