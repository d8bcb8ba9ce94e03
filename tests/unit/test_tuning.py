"""The choice of kernels: lookups, measuring by a clock that is made up, and caches that are good, broken or not allowed."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from albatross.models import tuning
from albatross.models.tuning import CHOICES, Defaults, Rule, Tuning, cache_folder, choose, load_tuning, shipped_defaults

CARD, CAPABILITY, DIGEST = "NVIDIA H200", (9, 0), "0123456789abcdef"
PAIR = ("rows", "cublas")
DEFAULTS = Defaults("sm_90", (Rule("rows", 64), Rule("cublas")), {(512, 256): {8: "cublas", 32: "rows"}})


def clock(**seconds: float) -> Callable[[str], float]:
    """Each candidate takes the same time whenever it is asked."""
    return seconds.__getitem__


def load(folder: Path) -> Tuning:
    return load_tuning(CARD, CAPABILITY, DIGEST, folder)


@pytest.mark.parametrize(("rows", "choice"), [(1, "rows"), (64, "rows"), (65, "cublas"), (100_000, "cublas")])
def test_a_shape_of_which_nothing_is_known_follows_the_rule(rows: int, choice: str) -> None:
    assert Tuning(CARD, DIGEST, DEFAULTS).lookup(4096, 4096, rows) == choice


@pytest.mark.parametrize(
    ("rows", "choice"), [(1, "cublas"), (8, "cublas"), (9, "rows"), (32, "rows"), (33, "rows"), (65, "cublas")]
)
def test_a_shape_in_a_table_takes_its_next_larger_number_of_rows_and_the_rule_beyond(rows: int, choice: str) -> None:
    assert Tuning(CARD, DIGEST, DEFAULTS).lookup(512, 256, rows) == choice


def test_what_was_measured_wins_over_what_is_shipped() -> None:
    found = Tuning(CARD, DIGEST, DEFAULTS, {(512, 256): {16: "rows"}})
    assert [found.lookup(512, 256, rows) for rows in (8, 16, 17)] == ["rows", "rows", "rows"]
    assert found.lookup(256, 512, 100) == "cublas"


def test_a_measurement_changes_what_was_looked_up_before() -> None:
    found = Tuning(CARD, DIGEST, DEFAULTS)
    assert found.lookup(4096, 4096, 3) == "rows"
    assert found.measure(4096, 4096, 4, PAIR, clock(rows=2.0, cublas=1.0)) == "cublas"
    assert found.lookup(4096, 4096, 3) == "cublas"


def test_the_quickest_is_chosen() -> None:
    assert choose(("a", "b", "c"), clock(a=3.0, b=1.0, c=2.0)) == "b"


def test_the_first_candidate_stays_unless_another_saves_something() -> None:
    assert choose(("a", "b"), clock(a=1.0, b=0.99)) == "a"
    assert choose(("a", "b"), clock(a=1.0, b=0.97)) == "b"


def test_one_slow_moment_of_the_machine_changes_nothing() -> None:
    calls: list[str] = []

    def time_fn(name: str) -> float:
        calls.append(name)
        return {"a": 1.0, "b": 2.0}[name] + (10.0 if len(calls) in (3, 4) else 0.0)

    assert choose(("a", "b"), time_fn) == "a"
    assert calls[:4] == ["a", "b", "a", "b"]


def test_a_single_candidate_is_not_measured() -> None:
    assert choose(("a",), clock()) == "a"


def test_a_second_engine_measures_nothing_that_the_first_has_saved(tmp_path: Path) -> None:
    first = load(tmp_path / "cache")
    first.measure(4096, 1024, 4, PAIR, clock(rows=2.0, cublas=1.0))
    first.measure(4096, 1024, 128, PAIR, clock(rows=1.0, cublas=2.0))
    first.save()
    second = load(tmp_path / "cache")
    assert second.measure(4096, 1024, 4, PAIR, clock()) == "cublas"
    assert [second.lookup(4096, 1024, rows) for rows in (4, 128)] == ["cublas", "rows"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tuning-nvidia-h200-0123456789ab.json"]


def test_another_card_or_library_has_a_cache_of_its_own(tmp_path: Path) -> None:
    first = load(tmp_path)
    first.measure(64, 64, 1, PAIR, clock(rows=2.0, cublas=1.0))
    first.save()
    assert load_tuning("NVIDIA L4", (8, 9), DIGEST, tmp_path).measured == {}
    assert load_tuning(CARD, CAPABILITY, "fedcba9876543210", tmp_path).measured == {}


GOOD = {"schema": 1, "card": CARD, "digest": DIGEST, "choices": {"64x32": {"1": "cublas"}}}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe", b"[]", b"{", json.dumps({**GOOD, "schema": 99}).encode(), json.dumps({**GOOD, "digest": "x"}).encode(),
        json.dumps({**GOOD, "choices": {"64by32": {"1": "cublas"}}}).encode(), json.dumps({**GOOD, "choices": [1]}).encode(),
        json.dumps({**GOOD, "choices": {"64x32": {"one": "cublas"}}}).encode(),
    ],
)  # fmt: skip
def test_a_cache_that_is_no_use_is_named_in_the_log_and_defaults_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = load(tmp_path).path
    assert path is not None
    path.write_bytes(content)
    assert load(tmp_path).lookup(64, 32, 1) == shipped_defaults(CAPABILITY).choice(1)
    assert str(path) in caplog.text


def test_a_choice_that_this_version_does_not_have_is_left_out(tmp_path: Path) -> None:
    path = load(tmp_path).path
    assert path is not None
    path.write_text(json.dumps({**GOOD, "choices": {"64x32": {"1": "sorcery", "2": "cublas"}, "8x8": {"1": "sorcery"}}}))
    assert load(tmp_path).measured == {(64, 32): {2: "cublas"}}


def test_a_folder_that_cannot_be_written_costs_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    found = load(tmp_path / "file")
    found.measure(64, 64, 1, PAIR, clock(rows=2.0, cublas=1.0))
    caplog.clear()
    found.save()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert found.lookup(64, 64, 1) == "cublas"


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "albatross"
    assert load_tuning(CARD, CAPABILITY, DIGEST).path == tmp_path / "albatross" / "tuning-nvidia-h200-0123456789ab.json"


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/albatross"), ("darwin", "Library/Caches/albatross"), ("win32", "cache/albatross/cache")],
)
def test_the_cache_lies_where_the_system_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, expected: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / expected


def test_a_user_without_a_home_has_no_cache_and_defaults_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    found = load_tuning(CARD, CAPABILITY, DIGEST)
    found.save()
    assert found.lookup(64, 64, 1) == shipped_defaults(CAPABILITY).choice(1)
    assert "no home folder" in caplog.text


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_80"), ((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((12, 0), "sm_90")],
)
def test_a_card_takes_the_defaults_of_the_newest_architecture_before_it(capability: tuple[int, int], arch: str) -> None:
    assert shipped_defaults(capability).arch == arch


def test_the_shipped_defaults_name_known_choices_and_cover_every_number_of_rows() -> None:
    content = json.loads(Path(tuning.__file__).with_name("tuning_defaults.json").read_text())
    assert set(content) == {"sm_80", "sm_89", "sm_90"}
    for arch in content.values():
        named = [rule["choice"] for rule in arch["rules"]]
        named += [choice for rows in arch["choices"].values() for choice in rows.values()]
        assert set(named) <= set(CHOICES)
        assert "max_rows" not in arch["rules"][-1]
