"""manifest/matrix.toml as data, and what ci/matrix.py makes of it: cells, six-tuples, and a wheel or a reason for each."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import (
    MATRIX_FILE,
    Cell,
    Combination,
    Machine,
    Matrix,
    MatrixError,
    cell_of_record,
    expand,
    plan,
    read_matrix,
    registry_machine,
    resolve,
)

ROOT = Path(__file__).parents[2]
STABLE = "S-cu130-linux_x86_64"
EXACT = "C-torch2.11-cu130-cp312-linux_x86_64"
WANTED = Combination("rwkv7_state_fwd_fp16", "2.11", "13.0", "cp312", "linux_x86_64", "sm_90")
SMALL = """
schema = 2
name = "lib"
glibc = "2.28"
stable_headers = "2.10"
default = ["C-torch2.10-cu130-cp312-linux_x86_64"]
tools = []
[[cell]]
lane = "C"
torch = ["2.10"]
cuda = ["13.0"]
python_abi = ["cp312"]
platform = ["linux_x86_64"]
[torch."2.10"]
release = "2.10.0"
cuda = ["13.0"]
python = ["cp312"]
[cuda."13.0"]
arch = ["sm_90"]
ptx = []
[platform.linux_x86_64]
tag = "linux_x86_64"
"""


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return read_matrix()


@pytest.fixture(scope="module")
def machine(matrix: Matrix) -> Machine:
    return registry_machine(matrix)


def reason(matrix: Matrix, machine: Machine, key: str) -> str:
    fate = plan(matrix, matrix.cell(key), machine)
    assert fate.action == "refused"
    assert fate.reason is not None
    return fate.reason


def read_text(folder: Path, text: str) -> Matrix:
    path = folder / "matrix.toml"
    path.write_text(text)
    return read_matrix(path)


def test_the_matrix_has_every_wheel_that_is_wanted_once(matrix: Matrix) -> None:
    exact = {(cell.torch, cell.cuda, cell.python_abi, cell.platform) for cell in matrix.cells.values() if cell.lane == "C"}
    assert len(exact) == 9 * 5 * 5 * 3
    assert {cell.torch for cell in matrix.cells.values()} == {f"2.{minor}" for minor in range(7, 16)}
    assert [cell.key for cell in matrix.cells.values() if cell.lane == "S" and cell.platform == "linux_x86_64"] == [
        "S-cu128-linux_x86_64", STABLE,
    ]


def test_every_six_tuple_gets_a_wheel_or_one_sentence(matrix: Matrix) -> None:
    built = [matrix.cell(key) for key in matrix.default]
    wanted = expand(matrix)
    assert len(set(wanted)) == len(wanted) > 4000
    answers = [resolve(matrix, combination, built) for combination in wanted]
    sentences = {answer for answer in answers if isinstance(answer, str)}
    assert {answer.key for answer in answers if isinstance(answer, Cell)} == set(matrix.default)
    assert all(re.fullmatch(r"[A-Z][^\n]+[^.]\.", sentence) for sentence in sentences), sentences


def test_a_six_tuple_gets_the_exact_wheel_before_the_one_for_all_torches(matrix: Matrix) -> None:
    exact, stable = matrix.cell(EXACT), matrix.cell(STABLE)
    assert resolve(matrix, WANTED, [stable, exact]) is exact
    assert resolve(matrix, WANTED, [stable]) is stable
    assert resolve(matrix, WANTED._replace(python_abi="cp310"), [stable, exact]) is stable


def test_the_stable_wheel_serves_later_torches_of_any_cuda_and_no_earlier_one(matrix: Matrix) -> None:
    stable = matrix.cell(STABLE)
    assert stable.serves(WANTED._replace(torch="2.15", cuda="13.2", python_abi="cp314"))
    assert stable.serves(WANTED._replace(torch="2.10", cuda="12.8"))
    assert not stable.serves(WANTED._replace(torch="2.9"))
    assert not stable.serves(WANTED._replace(platform="win_amd64"))


@pytest.mark.parametrize(
    ("field", "other"),
    [("name", "another"), ("torch", "2.12"), ("cuda", "13.2"), ("python_abi", "cp311"), ("platform", "linux_aarch64")],
)
def test_an_exact_wheel_serves_nothing_that_differs_in_one_field(matrix: Matrix, field: str, other: str) -> None:
    assert matrix.cell(EXACT).serves(WANTED)
    assert not matrix.cell(EXACT).serves(WANTED._replace(**{field: other}))


def test_code_runs_on_later_minors_of_its_major_and_ptx_on_all_later_cards(matrix: Matrix) -> None:
    cell = replace(matrix.cell(STABLE), arch=("sm_80", "sm_89"), ptx=("compute_100",))
    on = {arch: cell.runs_on(arch) for arch in ("sm_75", "sm_80", "sm_87", "sm_90", "sm_100", "sm_120")}
    assert on == {"sm_75": False, "sm_80": True, "sm_87": True, "sm_90": False, "sm_100": True, "sm_120": True}


def test_the_newest_card_of_an_old_toolkit_is_served_by_its_ptx(matrix: Matrix) -> None:
    cell = matrix.cell("C-torch2.7-cu126-cp312-linux_x86_64")
    assert "sm_120" not in cell.arch
    assert cell.runs_on("sm_120")


def test_a_toolkit_without_ptx_is_the_reason_for_a_later_card(tmp_path: Path) -> None:
    small = read_text(tmp_path, SMALL + '[cuda."13.2"]\narch = ["sm_120"]\nptx = []\n')
    wanted = Combination("lib", "2.10", "13.0", "cp312", "linux_x86_64", "sm_120")
    assert wanted in expand(small)
    assert resolve(small, wanted, []) == "nvcc 13.0 compiles nothing that runs on sm_120: a later CUDA does."


def test_that_there_is_no_such_torch_comes_before_all_other_reasons(matrix: Matrix, machine: Machine) -> None:
    assert reason(matrix, machine, "C-torch2.7-cu130-cp312-win_amd64") == "No torch 2.7 for CUDA 13.0 is known."
    assert reason(matrix, machine, "C-torch2.8-cu126-cp314-linux_aarch64") == "There is no torch 2.8 for Python 3.14."
    built = [matrix.cell(STABLE)]
    assert resolve(matrix, WANTED._replace(torch="2.14", cuda="12.8"), built) == "No torch 2.14 for CUDA 12.8 is known."


def test_a_wheel_of_another_platform_is_refused_with_what_it_would_take(matrix: Matrix, machine: Machine) -> None:
    text = reason(matrix, machine, "S-cu130-linux_aarch64")
    assert text.startswith("This is linux_x86_64, and no wheel for linux_aarch64 comes from it: ")
    assert plan(matrix, matrix.cell("S-cu130-linux_aarch64"), replace(machine, platform="linux_aarch64")).action == "named"


def test_a_toolkit_that_no_registry_has_is_refused_unless_the_machine_has_it(matrix: Matrix, machine: Machine) -> None:
    text = reason(matrix, machine, "S-cu128-linux_x86_64")
    assert text.startswith("There is no nvcc 12.8 on PATH, and the package registry's CUDA 12 packages lack nvcc")
    equipped = replace(machine, toolkits=machine.toolkits | {"12.8"})
    assert plan(matrix, matrix.cell("S-cu128-linux_x86_64"), equipped).action == "named"


def test_a_python_without_headers_is_refused_with_how_to_get_it(matrix: Matrix, machine: Machine) -> None:
    bare = replace(machine, pythons=frozenset({"cp311"}))
    text = reason(matrix, bare, EXACT)
    assert text == "No Python 3.12 with its headers was found: install one (python3.12-dev, or pyenv install 3.12)."
    assert plan(matrix, matrix.cell(STABLE), bare).action == "build"


def test_the_registry_has_all_that_the_default_wheels_need(matrix: Matrix, machine: Machine) -> None:
    assert {matrix.cell(key).lane for key in matrix.default} == {"S", "C"}
    assert [plan(matrix, matrix.cell(key), machine) for key in matrix.default] == [("build", None)] * len(matrix.default)


def test_a_wheel_that_is_built_only_if_named_says_so_and_which_other_serves(matrix: Matrix, machine: Machine) -> None:
    served = plan(matrix, matrix.cell("C-torch2.12-cu130-cp310-linux_x86_64"), machine)
    alone = plan(matrix, matrix.cell("C-torch2.9-cu130-cp310-linux_x86_64"), machine)
    mend = "It is built only if named: python ci/build_matrix.py --only {}."
    assert served == ("named", f"The wheel {STABLE} serves it. " + mend.format("C-torch2.12-cu130-cp310-linux_x86_64"))
    assert alone == ("named", mend.format("C-torch2.9-cu130-cp310-linux_x86_64"))


def test_a_wheel_that_could_be_there_says_how_to_build_it(matrix: Matrix) -> None:
    answer = resolve(matrix, WANTED._replace(python_abi="none"), [])
    assert answer == f"The wheel {STABLE} can be built, but is not among the finished ones: run python ci/build_matrix.py."


def test_labels_tell_toolkit_and_torch(matrix: Matrix) -> None:
    assert matrix.cell(STABLE).label == "cu130.stable210"
    assert matrix.cell(EXACT).label == "cu130.torch211"


def test_a_record_leads_to_its_cell(matrix: Matrix) -> None:
    record = {"name": matrix.name, "lane": "C", "python_abi": "cp312", "platform": "linux_x86_64"}
    record |= {"torch": {"min": "2.11"}, "cuda": {"toolkit": "13.0.88"}}
    assert cell_of_record(matrix, record) is matrix.cell(EXACT)
    stable = {**record, "lane": "S", "python_abi": "none", "torch": {"min": "2.10"}}
    assert cell_of_record(matrix, stable) is matrix.cell(STABLE)


def test_a_record_of_no_cell_is_refused(matrix: Matrix) -> None:
    record = {"name": matrix.name, "lane": "S", "python_abi": "none", "platform": "linux_x86_64"}
    with pytest.raises(MatrixError, match="The matrix has no cell S-cu135-linux_x86_64"):
        cell_of_record(matrix, {**record, "torch": {"min": "2.10"}, "cuda": {"toolkit": "13.5.37"}})
    with pytest.raises(MatrixError, match=r"is for rwkv7_state_fwd_fp16 and torch 2\.10, found .* and torch 2\.11"):
        cell_of_record(matrix, {**record, "torch": {"min": "2.11"}, "cuda": {"toolkit": "13.0.88"}})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 2", "schema = 3", "has layout 3, expected 2"),
        ('torch = ["2.10"]', 'torch = ["2.99"]', "A cell names torch 2.99, but the matrix has no"),
        ('python_abi = ["cp312"]', 'python_abi = ["cp312", "cp312"]', "must have each of these cells once: C-torch2.10"),
        ('default = ["C-torch2.10', 'default = ["C-torch2.11', "must have each of these cells once: C-torch2.11"),
    ],
)
def test_a_matrix_that_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert read_text(tmp_path, SMALL).default == ("C-torch2.10-cu130-cp312-linux_x86_64",)
    with pytest.raises(MatrixError, match=re.escape(message)):
        read_text(tmp_path, SMALL.replace(old, new))


def test_cmake_builds_the_code_and_asks_for_the_drivers_that_the_matrix_tells_of(matrix: Matrix) -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    lists = re.findall(r"ALL_ARCHS ((?:\d+\.\d ?)+)\)", cmake)
    archs = [f"sm_{arch.replace('.', '')}" for part in lists for arch in part.split()]
    stable = matrix.cell(STABLE)
    assert list(stable.arch) == archs
    assert stable.ptx == (archs[-1].replace("sm", "compute"),)
    assert f"set(TORCH_MIN {stable.torch})" in cmake
    assert f"set(LIBRARY_NAME {matrix.name})" in cmake
    for version, facts in matrix.cuda.items():
        assert f"set(DRIVER_MIN_{version.split('.')[0]} {facts['driver_min']})" in cmake


def test_the_matrix_is_where_the_scripts_look_for_it() -> None:
    assert MATRIX_FILE == ROOT / "manifest" / "matrix.toml"
    assert MATRIX_FILE.is_file()
