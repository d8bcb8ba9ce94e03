"""The reading of finished wheels: what is refused of an archive, its name, its RECORD and what it asks for."""

from pathlib import Path
from typing import Any

import pytest
from matrix import Cell
from wheel_cases import CLASSIC, STABLE, change_member, make_wheel
from wheel_file import Wheel, WheelError, name_problems, read_wheel, record_problems, requirement_problems


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    return make_wheel(tmp_path)


def test_a_good_archive_has_no_problems(wheel: Wheel) -> None:
    assert (record_problems(wheel.path), name_problems(wheel)) == ([], [])


@pytest.mark.parametrize(
    ("member", "content", "words"),
    [
        ("albatross/__init__.py", b"changed", ["albatross/__init__.py is not the file that RECORD tells of"]),
        ("albatross/__init__.py", None, ["albatross/__init__.py is in RECORD, but not in the archive"]),
        ("albatross/more.py", b"", ["albatross/more.py is in the archive, but not in RECORD"]),
        (f"albatross/_native/lib{STABLE.name}.so", b"other", ["RECORD tells of", "is not the file that was built"]),
    ],
)
def test_an_archive_that_was_changed_is_refused(wheel: Wheel, member: str, content: bytes | None, words: list[str]) -> None:
    change_member(wheel.path, member, content)
    problems = record_problems(wheel.path)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python_abi": "cp312"}, "Its tags are py3-none, expected cp312-cp312"),
        ({"platform": "linux_aarch64"}, "but the library was built for linux_aarch64"),
    ],
)
def test_a_name_that_says_something_else_than_the_record_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (problem,) = name_problems(make_wheel(tmp_path, **changes))
    assert words in problem


@pytest.mark.parametrize(
    ("cell", "requires", "words"),
    [
        (STABLE, "torch>=2.10,<3", None),
        (CLASSIC, "torch==2.11.*", None),
        (CLASSIC, "torch<2.12,>=2.11", None),
        (STABLE, "torch>=2.9", "It asks for torch>=2.9, but its library is for torch 2.10 or later."),
        (STABLE, "torch>=2.11", "It asks for torch>=2.11, but its library is for torch 2.10 or later."),
        (STABLE, "numpy", "It does not ask for torch."),
        (CLASSIC, "torch>=2.11", "It asks for torch>=2.11, but its library is for torch 2.11 alone."),
    ],
)
def test_a_wheel_must_ask_for_the_torch_that_its_library_serves(
    tmp_path: Path, cell: Cell, requires: str, words: str | None
) -> None:
    assert requirement_problems(make_wheel(tmp_path, cell, requires=requires)) == ([] if words is None else [words])


def test_what_is_no_wheel_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "albatross_rwkv-0.1.0-py3-none-any.whl").write_bytes(b"no archive")
    for name in ("albatross_rwkv-0.1.0-py3-none-any.whl", "missing-0.1.0-py3-none-any.whl", "notes.txt"):
        with pytest.raises(WheelError, match=f"{name} is no wheel of albatross-rwkv"):
            read_wheel(tmp_path / name)
    with pytest.raises(WheelError, match="build record of layout 1, expected 2: build it again"):
        make_wheel(tmp_path, schema=1)
