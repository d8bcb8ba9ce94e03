"""The wheels that setup.py builds without a compiler and with one, their bytes, and the data that both must agree with.

Every build runs on a copy of the sources, in a process of its own.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import albatross
from albatross.build.sources import source_digest
from albatross.build.toolchain import CUDA_PACKAGES, TORCH_MIN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
NATIVE = Path(albatross.__file__).parent / "_native"
LIBRARY = NATIVE / "librwkv7_state_fwd_fp16.so"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="this installation has no native library (see albatross doctor)")
TOOLS = ("cmake", "ninja", "g++", "objcopy")
needs_compiler = pytest.mark.skipif(
    NVCC is None or not all(map(shutil.which, TOOLS)), reason=f"needs nvcc and {', '.join(TOOLS)}"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "sources")


def copy_sources(folder: Path) -> Path:
    """A copy of what a source distribution holds, with a stand-in for the 18 MB of the demo model."""
    ignore = shutil.ignore_patterns("__pycache__", "_native", "*.pth", ".*_cache")
    for name in ("python", "server", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "python" / "albatross" / "demo" / "gosling.pth").write_bytes(b"stand-in")
    return folder


def build_wheel(sources: Path, **environment: str) -> tuple[Path, str]:
    """The wheel that setup.py's backend makes under these variables, and what the build printed. Fails with that output."""
    return build("wheel", sources, environment)


def build(kind: str, sources: Path, environment: dict[str, str]) -> tuple[Path, str]:
    dropped = re.compile("CUDACXX|CUDA_HOME|CUDA_PATH|TORCH_CUDA_ARCH_LIST|MAX_JOBS|SOURCE_DATE_EPOCH|ALBATROSS_.*")
    inherited = {name: value for name, value in os.environ.items() if not dropped.fullmatch(name)}
    code = f"from setuptools import build_meta; print('WHEEL', build_meta.build_{kind}('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=sources, env={**inherited, **environment}, capture_output=True, text=True, timeout=110
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return sources / "dist" / done.stdout.split("WHEEL ")[-1].strip(), output


def read_record(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        return dict(json.loads(archive.read("albatross/_native/_build.json")))


def test_a_build_without_a_compiler_gives_a_pure_wheel_for_every_python(sources: Path) -> None:
    stale = sources / "build" / "lib" / "albatross" / "removed_long_ago.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    wheel, output = build_wheel(sources, CUDA_HOME="/nonexistent")
    assert wheel.name == f"albatross_rwkv-{albatross.__version__}-py3-none-any.whl"
    assert "built without its native library: no nvcc was found" in output
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"albatross_rwkv-{albatross.__version__}.dist-info/METADATA").decode()
        scripts = archive.read(f"albatross_rwkv-{albatross.__version__}.dist-info/entry_points.txt").decode()
    expected = {"albatross/__init__.py", "albatross/ops/_loader.py", "albatross/py.typed", "albatross/demo/gosling.pth"}
    assert expected | {"albatross_server/app.py", "albatross_server/routes/__init__.py"} <= names
    assert {"albatross/_source/CMakeLists.txt", "albatross/_source/csrc/cuda/wkv7.cu", "albatross/_source/constants.py"} <= names
    assert "albatross/models/tuning_defaults.json" in names
    assert not [name for name in names if name.endswith(".so") or "removed_long_ago" in name]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"albatross", "albatross_server"}
    assert "Requires-Python: >=3.10" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "albatross = albatross.cli.main:main" in scripts


def test_an_installation_without_the_library_says_why_in_the_report(sources: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(sources, ALBATROSS_SKIP_BUILD="1")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import json; from albatross.cli.doctor import collect_report; print(json.dumps(collect_report()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    environment.pop("ALBATROSS_LIB", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    library = json.loads(done.stdout.splitlines()[-1])["native_library"]
    assert library["name"] == "rwkv7_state_fwd_fp16"
    assert "no native library, because it was built with ALBATROSS_SKIP_BUILD=1" in library["problem"]


def test_a_wheel_ships_the_sources_that_it_is_built_from(sources: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(sources, ALBATROSS_SKIP_BUILD="1")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from albatross.build.sources import source_digest, source_root; print(source_root(), source_digest(source_root()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "site" / "albatross" / "_source"), source_digest(sources)], done.stderr


def test_the_same_sources_give_the_same_wheel_in_any_folder_and_under_any_umask(tmp_path: Path) -> None:
    digests = set()
    for name, mask in (("one", 0o022), ("another place", 0o077)):
        before = os.umask(mask)
        try:
            sources = copy_sources(tmp_path / name)
            if mask == 0o077:
                (sources / "README.md").chmod(0o755)
            wheel, _ = build_wheel(sources, ALBATROSS_SKIP_BUILD="1", SOURCE_DATE_EPOCH="1700000000")
        finally:
            os.umask(before)
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_label_becomes_the_local_part_of_the_version(sources: Path) -> None:
    wheel, _ = build_wheel(sources, ALBATROSS_SKIP_BUILD="1", ALBATROSS_VERSION_LABEL="cu130.stable210")
    version = f"{albatross.__version__}+cu130.stable210"
    assert wheel.name == f"albatross_rwkv-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert f"\nVersion: {version}\n" in archive.read(f"albatross_rwkv-{version}.dist-info/METADATA").decode()
    assert read_record(wheel)["version"] == albatross.__version__


def test_a_label_that_no_version_may_have_is_refused(sources: Path) -> None:
    with pytest.raises(AssertionError, match=r"ALBATROSS_VERSION_LABEL must be small letters and digits, .* but is 'CUDA 13'"):
        build_wheel(sources, ALBATROSS_VERSION_LABEL="CUDA 13")


def test_a_named_lane_is_built_or_refused_with_what_is_missing(sources: Path) -> None:
    with pytest.raises(AssertionError, match=r"No nvcc was found .* or run pip install nvidia-cuda-nvcc=="):
        build_wheel(sources, CUDA_HOME="/nonexistent", ALBATROSS_LANE="S")
    with pytest.raises(AssertionError, match="A lane must be one of S and C, found 'X'"):
        build_wheel(sources, ALBATROSS_LANE="X")


def test_an_editable_install_puts_its_record_into_the_work_tree_and_no_copy_of_the_sources(sources: Path) -> None:
    wheel, _ = build("editable", sources, {"ALBATROSS_SKIP_BUILD": "1"})
    package = sources / "python" / "albatross"
    assert json.loads((package / "_native" / "_build.json").read_text())["library"] is None
    assert not (package / "_source").exists()
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "/_native/" in name]


def test_a_torch_folder_that_is_none_stops_the_build_with_a_sentence(sources: Path) -> None:
    with pytest.raises(AssertionError, match="ALBATROSS_TORCH_DIR must name the folder of a torch package, but /nonexistent"):
        build_wheel(sources, CUDACXX=sys.executable, ALBATROSS_TORCH_DIR="/nonexistent")


@needs_compiler
@pytest.mark.slow
def test_a_build_for_chosen_architectures_gives_one_wheel_with_a_clean_library(sources: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(sources, CUDACXX=str(NVCC), TORCH_CUDA_ARCH_LIST="8.0+PTX", MAX_JOBS="2")
    assert wheel.name == f"albatross_rwkv-{albatross.__version__}-py3-none-linux_x86_64.whl"
    record = read_record(wheel)
    assert (record["arch"], record["ptx"]) == (["sm_80"], ["compute_80"])
    assert record["source"] == source_digest(sources)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert_is_clean(tmp_path / "site" / "albatross" / "_native" / record["library"])


@needs_compiler
def test_an_architecture_that_is_none_stops_the_build_with_a_sentence(sources: Path) -> None:
    with pytest.raises(AssertionError, match=r"An architecture must look like 9\.0, 9\.0a or 9\.0\+PTX, found 'Hopper'"):
        build_wheel(sources, CUDACXX=str(NVCC), TORCH_CUDA_ARCH_LIST="Hopper")


@needs_library
def test_the_installed_library_is_clean() -> None:
    assert_is_clean(LIBRARY)


def assert_is_clean(library: Path) -> None:
    """No symbol of one torch, Python or CUDA runtime, no library a machine may lack, and the code _build.json tells of."""
    done = subprocess.run(
        [sys.executable, ROOT / "ci" / "check_library.py", library], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@needs_library
def test_the_library_opens_in_any_torch_once_and_no_second_copy_does(tmp_path: Path) -> None:
    code = f"""
import shutil
from dataclasses import replace
from pathlib import Path
from albatross.errors import NativeLibraryError
from albatross.ops import _loader
from albatross.ops._manifest import read_candidate
candidate = read_candidate("package", _loader.PACKAGE_FOLDER)
opened = _loader.open_library(candidate)
assert opened.name == "rwkv7_state_fwd_fp16"
assert _loader.open_library(candidate) is opened
copy = shutil.copy(candidate.path, {str(tmp_path / "copy.so")!r})
try:
    _loader.open_library(replace(candidate, path=Path(copy)))
except NativeLibraryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "already holds the albatross ops of another library" in done.stdout


def test_package_builder_and_cmake_agree_on_the_first_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first = "{}.{}".format(*TORCH_MIN["S"])
    assert f"torch>={first},<3" in project["dependencies"]
    assert f"set(TORCH_MIN {first})" in (ROOT / "CMakeLists.txt").read_text()


def test_the_builder_and_cibuildwheel_take_the_same_toolkit() -> None:
    before_build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["linux"]["before-build"]
    assert " ".join(CUDA_PACKAGES) in before_build[1]


def test_the_build_needs_no_torch_of_its_own() -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [name for name in requires if name.startswith("torch")]


@pytest.mark.parametrize(
    ("platform", "arch", "identifier"), [("linux", "x86_64", "cp312-manylinux_x86_64"), ("windows", "AMD64", "cp312-win_amd64")]
)
def test_cibuildwheel_reads_the_configuration_and_builds_one_wheel_a_system(platform: str, arch: str, identifier: str) -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--platform", platform, "--archs", arch]
    done = subprocess.run([*command, "--print-build-identifiers", ROOT], capture_output=True, text=True, timeout=110)
    assert done.stdout.split() == [identifier], done.stderr
