"""The builder: architectures, sources and their digest, what a build does, and the record it leaves."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from build_cases import PTXAS, ROOT, STEP, Workshop, put_sources

from albatross import __version__
from albatross.build import native, resources, sources
from albatross.build.native import Listener, Options, archs_of, normalize_archs
from albatross.build.toolchain import BuildError


class Heard(Listener):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.messages: list[str] = []

    def step(self, done: int, total: int, text: str) -> None:
        self.steps.append((done, total, text))

    def message(self, line: str) -> None:
        self.messages.append(line)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("", ""),
        ("90", "9.0"),
        ("90+PTX,80 8.6", "8.0;8.6;9.0+PTX"),
        ("12.0;sm_90a", "9.0a;12.0"),
        ("90,9.0+ptx", "9.0+PTX"),
        ("120,100", "10.0;12.0"),
    ],
)
def test_architectures_are_taken_in_every_usual_form_and_sorted(text: str, archs: str) -> None:
    assert normalize_archs(text) == archs


@pytest.mark.parametrize("text", ["Hopper", "9", "90+", "sm_90,x"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"An architecture must look like 9\.0, 9\.0a or 9\.0\+PTX, found '"):
        normalize_archs(text)


def test_cards_of_one_kind_are_built_for_once() -> None:
    assert archs_of([(9, 0), (8, 0), (9, 0)]) == "8.0;9.0"


def test_a_checkout_and_the_sources_in_its_wheel_have_one_digest(tmp_path: Path) -> None:
    for name, path in sources.source_files(ROOT).items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    assert (sources.is_checkout(ROOT), sources.is_checkout(tmp_path)) == (True, False)
    assert sources.source_digest(tmp_path) == sources.source_digest(ROOT)


def test_the_digest_is_over_names_and_contents_in_order(tmp_path: Path) -> None:
    root = put_sources(tmp_path)
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file():
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    assert sources.source_digest(root) == digest.hexdigest()


def test_notes_and_what_an_editor_leaves_change_no_digest_and_a_source_does(tmp_path: Path) -> None:
    root = put_sources(tmp_path)
    before = sources.source_digest(root)
    for name in ("README.md", ".scale.cu.swp", "scale.cu~"):
        (root / "csrc" / "cuda" / name).write_text("x")
    assert sources.source_digest(root) == before
    (root / "csrc" / "cuda" / "more.cu").touch()
    assert sources.source_digest(root) != before


def test_the_ops_are_those_that_the_sources_list() -> None:
    import albatross.ops

    assert set(sources.listed_ops(ROOT)) <= set(albatross.ops.__all__)
    assert "wkv7_prefill" in sources.listed_ops(ROOT)


def test_the_record_tells_all_of_the_library(workshop: Workshop) -> None:
    record = workshop.compile()
    library = workshop.target / "librwkv7_state_fwd_fp16.so"
    assert record == {
        "schema": 2,
        "name": "rwkv7_state_fwd_fp16",
        "version": __version__,
        "lane": "S",
        "platform": native.platform_name(),
        "library": library.name,
        "torch": {"abi": "stable", "min": "2.10", "max": None, "built_with": "2.13.0+cpu"},
        "cuda": {"toolkit": "13.0.88", "cudart": "static", "driver_min": "580"},
        "python_abi": "none",
        "arch": ["sm_90"],
        "ptx": [],
        "ops": ["scale"],
        "source": sources.source_digest(workshop.root),
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "why": None,
    }
    assert json.loads((workshop.target / "_build.json").read_text()) == record


def test_the_record_can_be_read_by_the_loader(workshop: Workshop) -> None:
    from albatross.ops._manifest import read_candidate

    workshop.compile()
    candidate = read_candidate("package", workshop.target)
    assert candidate.problem is None
    assert candidate.build is not None
    assert candidate.build.ops == ("scale",)


def test_the_classic_lane_is_for_one_torch_and_one_python(workshop: Workshop) -> None:
    record = workshop.compile(Options("9.0", lane="C"))
    assert record["torch"] == {"abi": "classic", "min": "2.13", "max": "2.13", "built_with": "2.13.0+cpu"}
    assert record["python_abi"].startswith("cp3")


def test_a_build_with_the_same_settings_is_not_set_up_again(workshop: Workshop) -> None:
    workshop.compile()
    library = workshop.target / "librwkv7_state_fwd_fp16.so"
    made = library.stat().st_mtime_ns
    workshop.compile(Options("9.0", jobs=2))
    assert workshop.calls() == ["cmake", "ninja", "ninja"]
    assert library.stat().st_mtime_ns == made
    workshop.compile(Options("8.0"))
    assert workshop.calls()[3:] == ["cmake", "ninja"]


def test_steps_and_warnings_are_told_and_resources_are_kept(workshop: Workshop) -> None:
    heard = Heard()
    workshop.compile(listener=heard)
    assert heard.steps == [(1, 2, STEP), (2, 2, "Linking CXX shared module librwkv7_state_fwd_fp16.so")]
    assert heard.messages == ["scale.cu(1): warning #177-D: it was declared but never used"]
    again = Heard()
    workshop.compile(listener=again)
    assert (again.steps, again.messages) == ([], [])
    (compiled,) = resources.load(workshop.folder)
    assert (compiled.source, compiled.seconds) == ("csrc/cuda/scale.cu", 2.5)
    assert compiled.kernels == [resources.Kernel("_Z12scale_kernelPf", "sm_90", 40, 16, 12, 8, 2048)]


def test_a_compiler_error_is_the_sentence_and_leaves_the_library_that_was_there(workshop: Workshop) -> None:
    record = workshop.compile()
    (workshop.folder / "librwkv7_state_fwd_fp16.so").unlink()
    said = "FAILED: scale.cu.o\nnvcc -c scale.cu\nscale.cu(3): error: no semicolon\n1 error detected\n"
    (workshop.steering / "fail-ninja").write_text(said)
    with pytest.raises(BuildError, match=r"does not compile: scale\.cu\(3\): error: no semicolon \(the whole output is in "):
        workshop.compile()
    assert json.loads((workshop.target / "_build.json").read_text()) == record
    assert "1 error detected" in (workshop.folder / "build.log").read_text()


def test_what_cmake_refuses_is_said_in_one_line_and_tried_anew(workshop: Workshop) -> None:
    refusal = workshop.steering / "fail-cmake"
    refusal.write_text("CMake Error at CMakeLists.txt:4 (message):\n  The first driver is\n  not known.\n\n\n-- Incomplete\n")
    with pytest.raises(BuildError, match=r"^The first driver is not known\. The whole output is in .*build\.log\.$"):
        workshop.compile()
    refusal.unlink()
    workshop.compile()


def test_an_architecture_that_the_toolkit_does_not_know_is_refused_before_it_compiles(workshop: Workshop) -> None:
    with pytest.raises(BuildError, match=r"nvcc 13\.0\.88 makes no code for sm_70, only for sm_80, sm_86, sm_90: name one"):
        workshop.compile(Options("7.0"))
    assert workshop.calls() == []


def test_another_lanes_library_does_not_stay_beside_the_new_one(workshop: Workshop) -> None:
    (workshop.target).mkdir()
    other = workshop.target / "rwkv7_state_fwd_fp16.cpython-312-x86_64-linux-gnu.so"
    other.touch()
    workshop.compile()
    assert not other.exists()


def test_a_folder_that_cannot_be_written_gives_a_sentence(workshop: Workshop) -> None:
    workshop.folder.touch()
    sentence = r"/cmake cannot be written \(File exists\): choose another\."
    with pytest.raises(BuildError, match=sentence), native.writing("choose another"):
        workshop.compile()


def test_functions_that_are_no_kernels_are_left_out() -> None:
    function = ["ptxas info    : Function properties for f", "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"]
    kernels = resources.parse([*function, *PTXAS.splitlines()])
    assert [kernel.name for kernel in kernels] == ["_Z12scale_kernelPf"]
    assert kernels[0].spills


def test_only_what_tells_of_resources_is_kept_from_the_user() -> None:
    assert all(map(resources.is_info, PTXAS.splitlines()))
    assert not resources.is_info("ptxas warning : Registers are spilled to local memory in function 'x', 4 bytes spill stores")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_names_of_kernels_are_readable() -> None:
    mangled = ["_ZN9albatross9wkv7_file19wkv7_prefill_kernelIf6__halfEEvNS_10Wkv7ParamsE", "_Z12scale_kernelPf"]
    assert resources.readable(mangled) == ["wkv7_prefill_kernel<float, __half>", "scale_kernel"]
