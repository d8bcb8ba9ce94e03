"""Which tools a native build finds, and the sentence for every piece that is missing or not as it must be."""

import shutil
import sys
from pathlib import Path

import pytest
from build_cases import ROOT, executable

from albatross.build import toolchain
from albatross.build.toolchain import CUDA_PACKAGES, BuildError, ToolchainError, find_toolchain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NVCC = '#!/bin/bash\necho "Cuda compilation tools, release 13.0, V13.0.88"\n'


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with packages, and an empty PATH; nothing is installed."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "ALBATROSS_TORCH_DIR", "CXX", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "site_folders", lambda: iter([tmp_path / "site"]))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / name))
    which = shutil.which

    def within(program: str, path: str | None = None) -> str | None:
        found = which(program, path=path)
        return found if found and found.startswith(str(tmp_path)) else None

    monkeypatch.setattr(toolchain.shutil, "which", within)
    return tmp_path / "site"


def put_everything(site: Path, *, torch: str = "2.13.0+cpu") -> None:
    executable(site / "nvidia" / "cu13" / "bin" / "nvcc", NVCC)
    executable(site.parent / "bin" / "cmake", '#!/bin/sh\necho "cmake version 3.25.1"\n')
    for name in ("ninja", "g++"):
        executable(site.parent / "bin" / name, "#!/bin/sh\n")
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '{torch}'\n")


def missing(**options: str) -> list[str]:
    with pytest.raises(ToolchainError) as error:
        find_toolchain(**options)
    return [str(piece) for piece in error.value.missing]


def test_tools_are_found_among_packages_without_importing_any(site: Path) -> None:
    put_everything(site)
    found = find_toolchain()
    assert (found.nvcc, found.toolkit) == (site / "nvidia" / "cu13" / "bin" / "nvcc", "13.0.88")
    assert (found.torch, found.torch_version) == (site / "torch", "2.13.0+cpu")


def test_every_missing_piece_is_named_at_once_with_how_to_get_it(site: Path) -> None:
    nvcc, torch, cmake, ninja, compiler = missing()
    assert nvcc.startswith("No nvcc was found (looked at CUDACXX, CUDA_HOME, PATH and the packages): install a CUDA toolkit, or")
    assert nvcc.endswith(f"or run pip install {' '.join(CUDA_PACKAGES)}.")
    assert torch.endswith("run pip install 'torch>=2.10'.")
    assert cmake.endswith("run pip install 'cmake>=3.24'.")
    assert ninja.endswith("run pip install ninja.")
    assert compiler.startswith("No C++ compiler was found")


def test_the_packages_named_are_a_whole_toolkit_of_the_matrix() -> None:
    matrix = tomllib.loads((ROOT / "manifest" / "matrix.toml").read_text())
    assert list(CUDA_PACKAGES) == matrix["cuda"]["13.0"]["packages"]


def test_a_path_without_a_c_compiler_is_said(site: Path) -> None:
    put_everything(site)
    (site.parent / "bin" / "g++").unlink()
    assert missing() == ["No C++ compiler was found (looked at CXX and PATH): install g++ (apt-get install g++)."]


def test_a_packaged_nvcc_that_may_not_run_is_said(site: Path) -> None:
    put_everything(site)
    nvcc = site / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.chmod(0o644)
    (sentence,) = missing()
    assert sentence == f"{nvcc} may not be run: run chmod a+x {nvcc.parent}/* {site}/nvidia/cu13/nvvm/bin/cicc."


def test_a_named_nvcc_is_used_or_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_everything(site)
    monkeypatch.setenv("CUDACXX", "/nonexistent/nvcc")
    (sentence,) = missing()
    assert "CUDACXX or CUDA_HOME names /nonexistent/nvcc" in sentence


def test_a_program_that_is_no_nvcc_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_everything(site)
    monkeypatch.setenv("CUDACXX", str(site.parent / "bin" / "cmake"))
    (sentence,) = missing()
    assert "--version does not answer as nvcc does" in sentence


def test_a_torch_without_the_whole_stable_abi_is_refused_in_lane_s_alone(site: Path) -> None:
    put_everything(site, torch="2.9.1+cu128")
    assert missing() == ["No torch 2.10 or later was found (ALBATROSS_TORCH_DIR names one): run pip install 'torch>=2.10'."]
    assert not any(sentence.startswith("No torch") for sentence in missing(lane="C"))


def test_the_classic_lane_needs_headers_of_python_and_pybind11(site: Path) -> None:
    put_everything(site)
    (sentence,) = missing(lane="C")
    assert sentence.startswith("No Python.h was found in ")
    (site.parent / "include").mkdir()
    (site.parent / "include" / "Python.h").touch()
    assert missing(lane="C") == ["No pybind11 was found: run pip install pybind11."]
    headers = site / "pybind11" / "include"
    (headers / "pybind11").mkdir(parents=True)
    (headers / "pybind11" / "pybind11.h").touch()
    found = find_toolchain("C")
    assert (found.python_include, found.pybind11_include) == (str(site.parent / "include"), str(headers))


def test_an_older_glibc_needs_the_linker_that_knows_it(site: Path) -> None:
    put_everything(site)
    assert missing(glibc="2.28") == ["No ziglang was found, which links for glibc 2.28: run pip install ziglang."]
    (site / "ziglang").mkdir()
    assert find_toolchain(glibc="2.28").zig == f"{sys.executable};-m;ziglang"


def test_an_unheard_of_lane_is_refused() -> None:
    with pytest.raises(BuildError, match=r"A lane must be one of S and C, found 'X'"):
        find_toolchain("X")


def test_other_systems_are_told_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.sys, "platform", "win32")
    (sentence,) = missing()
    assert sentence.startswith("The native library is built on Linux only, not on win32: use WSL 2")
