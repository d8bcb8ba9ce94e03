"""Installations and working copies that are made up, for tests of the choice among native libraries; CUDA kernels built for this
processor.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_host_cases import HostKernels


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> "HostKernels":
    from cuda_host_cases import HostKernels, missing_tool

    reason = missing_tool()
    if reason is not None:
        pytest.skip(reason)
    return HostKernels(tmp_path_factory.mktemp("cuda_host"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that is no checkout, with a library in its package; returns that."""
    from library_cases import put_library

    from albatross.build import sources
    from albatross.ops import _loader

    for name in _loader.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_loader, "PACKAGE_FOLDER", tmp_path / "_native")
    monkeypatch.setattr(sources, "source_root", lambda: None)
    return put_library(tmp_path / "_native")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working copy that the package runs from."""
    from albatross.build import sources

    root = tmp_path / "checkout"
    root.mkdir()
    monkeypatch.setattr(sources, "source_root", lambda: root)
    monkeypatch.setattr(sources, "is_checkout", lambda folder: folder == root)
    return root
