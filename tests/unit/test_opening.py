"""How a native library is opened, in either lane, and what is refused then."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from library_cases import LIBRARY_FILE, MACHINE, put_library

from albatross.errors import NativeLibraryError
from albatross.ops import _loader
from albatross.ops._manifest import read_candidate

pytestmark = pytest.mark.usefixtures("package")


def test_a_library_that_does_not_open_names_both_torch_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _loader.decide(MACHINE).chosen
    assert chosen is not None
    with pytest.raises(NativeLibraryError, match=r"built with torch 2\.13\.0\+cpu.* does not open in torch") as caught:
        _loader.open_library(chosen)
    assert str(torch.__version__) in str(caught.value)


def test_a_library_does_not_open_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _loader.decide(MACHINE).chosen
    assert chosen is not None
    monkeypatch.setattr(_loader, "_has_kernel", lambda op: True)
    with pytest.raises(NativeLibraryError, match="already holds the albatross ops of another library: start a new process"):
        _loader.open_library(chosen)


MODULE = """
#include <Python.h>
#include <stdlib.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "rwkv7_state_fwd_fp16"};
__attribute__((constructor)) static void on_load(void) { setenv("ALBATROSS_TEST_LOADED", "yes", 1); }
PyMODINIT_FUNC PyInit_rwkv7_state_fwd_fp16(void) { return PyModule_Create(&module); }
"""
COMPILER = shutil.which("cc") or shutil.which("gcc")
INCLUDE = Path(sysconfig.get_path("include"))


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A module of Python with the library's name, whose static initialiser runs when it is imported."""
    if COMPILER is None or not (INCLUDE / "Python.h").is_file():
        pytest.skip("needs a C compiler and Python.h")
    folder = tmp_path_factory.mktemp("module")
    source = folder / "module.c"
    source.write_text(MODULE)
    command = [COMPILER, "-shared", "-fPIC", f"-I{INCLUDE}", source, "-o", folder / LIBRARY_FILE]
    subprocess.run(command, check=True, timeout=60)
    return (folder / LIBRARY_FILE).read_bytes()


def test_a_library_for_one_python_is_imported(module: bytes, tmp_path: Path) -> None:
    put_library(tmp_path / "classic", module, python_abi="cp312", ops=[])
    code = f"""
import ctypes
from pathlib import Path
from albatross.ops import _loader
from albatross.ops._manifest import read_candidate
opened = _loader.open_library(read_candidate("package", Path({str(tmp_path / "classic")!r})))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(opened.name, getenv(b"ALBATROSS_TEST_LOADED"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "rwkv7_state_fwd_fp16 b'yes'", done.stderr


def test_a_library_that_opens_but_lacks_an_op_of_its_record_is_refused(module: bytes, tmp_path: Path) -> None:
    put_library(tmp_path / "classic", module, python_abi="cp312", ops=["sample"])
    candidate = read_candidate("package", tmp_path / "classic")
    with pytest.raises(NativeLibraryError, match=r"it does not hold sample: reinstall albatross-rwkv\."):
        _loader.open_library(candidate)


def test_a_library_for_one_python_that_is_no_module_is_refused(tmp_path: Path) -> None:
    put_library(tmp_path / "classic", python_abi="cp312")
    with pytest.raises(NativeLibraryError, match="does not open in torch"):
        _loader.open_library(read_candidate("package", tmp_path / "classic"))
