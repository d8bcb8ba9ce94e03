"""The cache of libraries built on the machine that runs them: keys, who builds and who waits, and awkward places."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from build_cases import ROOT, Workshop
from check_library import code_targets, needed_libraries

from albatross.build import jit, resources, sources
from albatross.build.jit import build_cached, cache_folder, cache_key, find_cached, make_plan, read_record
from albatross.build.lock import build_lock
from albatross.build.native import Listener, Options, Record
from albatross.build.toolchain import BuildError, ToolchainError

PLACE = "ein Ordner mit Umläuten 模型"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Where the builder finds its sources and its tools, and an empty cache."""
    workshop = Workshop(tmp_path / PLACE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / PLACE / "cache"))
    monkeypatch.setattr(jit, "source_root", lambda: workshop.root)
    monkeypatch.setattr(jit, "find_toolchain", lambda lane, glibc: workshop.tools)
    return workshop


def start_build(workshop: Workshop) -> "subprocess.Popen[str]":
    """Another process that builds the same and prints where; its builds take half a second."""
    (workshop.steering / "wait").write_text("0.5")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from albatross.build import jit
from albatross.build.native import Options
from albatross.build.toolchain import Toolchain
tools = Path({str(workshop.steering)!r})
toolchain = Toolchain(tools / "nvcc", "13.0.88", tools / "torch", "2.13.0+cpu", tools / "cmake", tools / "ninja")
jit.source_root = lambda: Path({str(workshop.root)!r})
jit.find_toolchain = lambda lane, glibc: toolchain
print(jit.build_cached(jit.make_plan(Options("9.0"))), flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_key_changes_with_everything_that_the_library_depends_on() -> None:
    facts = ("source", "13.0.88", "2.13.0", "9.0", "{}")
    changed = [tuple("other" if i == place else fact for i, fact in enumerate(facts)) for place in range(len(facts))]
    assert len({cache_key(*case) for case in (facts, *changed)}) == 6
    assert cache_key(*facts) == cache_key(*facts)


def test_options_are_part_of_the_key_but_not_the_number_of_compilers(workshop: Workshop) -> None:
    folders = {make_plan(options).folder for options in (Options("9.0"), Options("8.0"), Options("9.0", is_debug=True))}
    assert len(folders) == 3
    assert make_plan(Options("9.0", jobs=1)).folder in folders


def test_a_changed_source_is_another_library(workshop: Workshop) -> None:
    before = make_plan(Options("9.0")).folder
    (workshop.root / "csrc" / "cuda" / "scale.cu").write_text("// nothing\n")
    assert make_plan(Options("9.0")).folder != before


def test_planning_and_looking_write_nothing(workshop: Workshop) -> None:
    plan = make_plan(Options("9.0"))
    assert find_cached(plan) is None
    assert not cache_folder().exists()
    assert workshop.calls() == []


def test_a_library_is_built_once_and_found_from_then_on(workshop: Workshop) -> None:
    plan = make_plan(Options("9.0"))
    folder = build_cached(plan)
    assert folder == find_cached(plan) == plan.folder
    assert build_cached(plan) == folder
    assert workshop.calls() == ["cmake", "ninja"]
    record = json.loads((folder / "_build.json").read_text())
    assert (folder / record["library"]).is_file()
    assert record["source"] == sources.source_digest(workshop.root)
    assert resources.load(folder)[0].source == "csrc/cuda/scale.cu"
    assert sorted(path.name for path in cache_folder().iterdir()) == [plan.folder.name, f"{plan.folder.name}.lock"]


def test_an_entry_without_its_library_is_built_again(workshop: Workshop) -> None:
    plan = make_plan(Options("9.0"))
    library = build_cached(plan) / "librwkv7_state_fwd_fp16.so"
    library.unlink()
    assert find_cached(plan) is None
    build_cached(plan)
    assert library.is_file()


def test_a_build_that_fails_leaves_no_entry_and_is_tried_anew(workshop: Workshop) -> None:
    plan = make_plan(Options("9.0"))
    failure = workshop.steering / "fail-ninja"
    failure.write_text("scale.cu(1): error: no such thing\n")
    with pytest.raises(BuildError, match="error: no such thing"):
        build_cached(plan)
    assert find_cached(plan) is None
    failure.unlink()
    assert build_cached(plan) == plan.folder


def test_of_two_processes_one_builds_and_both_have_the_library(workshop: Workshop) -> None:
    first, second = start_build(workshop), start_build(workshop)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    folder = str(make_plan(Options("9.0")).folder)
    assert [out.strip() for out, _ in outputs] == [folder, folder], outputs
    assert workshop.calls() == ["cmake", "ninja"]


def test_the_lock_of_a_killed_process_holds_nobody_up(workshop: Workshop) -> None:
    process = start_build(workshop)
    wait_until(lambda: "ninja" in workshop.calls())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    (workshop.steering / "wait").unlink()
    plan = make_plan(Options("9.0"))
    assert plan.folder.with_name(f"{plan.folder.name}.lock").is_file()
    assert build_cached(plan, timeout_s=5) == plan.folder
    assert sorted(path.suffix for path in cache_folder().iterdir()) == ["", ".lock"]


def test_who_waits_is_told_for_whom_and_not_forever(workshop: Workshop) -> None:
    plan = make_plan(Options("9.0"))
    said: list[str] = []

    class Heard(Listener):
        def message(self, line: str) -> None:
            said.append(line)

    lock = plan.folder.with_name(f"{plan.folder.name}.lock")
    with (
        build_lock(lock, said.append),
        pytest.raises(BuildError, match=rf"Waited 0\.2 s for process {os.getpid()} on .*, which builds in .*: wait for it"),
    ):
        build_cached(plan, Heard(), timeout_s=0.2)
    assert len(said) == 1
    assert said[0].startswith(f"Waiting for process {os.getpid()} on ")


def test_a_cache_that_cannot_be_written_gives_a_sentence(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.root / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(workshop.root / "file"))
    mend = r"cannot be written \(Not a directory\): name a folder that can be written in XDG_CACHE_HOME\."
    with pytest.raises(BuildError, match=mend):
        build_cached(make_plan(Options("9.0")))


def test_a_library_in_a_cache_that_may_only_be_read_is_found(workshop: Workshop) -> None:
    """Another process has the lock as well: for the superuser, whom no permission stops, it shows that nothing is written."""
    plan = make_plan(Options("9.0"))
    build_cached(plan)
    with build_lock(plan.folder.parent / f"{plan.folder.name}.lock", pytest.fail):
        cache_folder().chmod(0o555)
        assert build_cached(plan, timeout_s=0) == plan.folder


def test_an_installation_without_sources_says_so(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "source_root", lambda: None)
    with pytest.raises(BuildError, match="has no sources of the native library to build from: reinstall albatross-rwkv"):
        make_plan(Options("9.0"))


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(jit.Path, "home", refuse)
    with pytest.raises(BuildError, match="no home folder to keep a built library in: name a folder that can be written in XDG"):
        cache_folder()


@pytest.fixture
def awkward_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel to build by real tools, in a place whose name has spaces, a comma and letters beyond ASCII."""
    place = tmp_path / f"{PLACE}, und so weiter"
    workshop = Workshop(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(jit, "source_root", lambda: workshop.root)


def build_really(options: Options) -> tuple[Path, Record]:
    """The library and its record; skipped with the sentence of what is missing."""
    try:
        plan = make_plan(options)
    except ToolchainError as error:
        pytest.skip(str(error))
    folder = build_cached(plan)
    record = read_record(folder)
    return folder / record["library"], record


def dynamic_symbols(library: Path) -> str:
    return subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("awkward_place")
def test_real_compilers_build_in_a_place_with_an_awkward_name() -> None:
    library, record = build_really(Options("9.0", jobs=2))
    assert (record["arch"], record["ptx"]) == (["sm_90"], [])
    (compiled,) = resources.load(library.parent)
    assert [kernel.arch for kernel in compiled.kernels] == ["sm_90"]
    assert 0 < compiled.kernels[0].registers < 255
    assert code_targets(library) == {"sm_90"}
    assert dynamic_symbols(library) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("awkward_place")
def test_the_classic_lane_is_a_module_of_this_python() -> None:
    library, record = build_really(Options("9.0", lane="C", jobs=2))
    assert library.name == f"rwkv7_state_fwd_fp16{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert record["torch"]["abi"] == "classic"
    assert dynamic_symbols(library).split()[-1] == "PyInit_rwkv7_state_fwd_fp16"
    assert "libtorch.so" in needed_libraries(library)
