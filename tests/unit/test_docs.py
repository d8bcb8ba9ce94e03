"""The documentation says what the code says: generated pages, commands, dependencies, links and make targets."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from albatross.cli.main import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TABLE_NAME = re.compile(r"^\| ([a-z0-9-]+) \|", re.MULTILINE)
REQUIREMENT_NAME = re.compile(r"^[A-Za-z0-9-]+")
MAKE_CALL = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
OWN_NAME = "albatross-rwkv"


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def requirement_names(requirements: list[str]) -> set[str]:
    matches = (REQUIREMENT_NAME.match(requirement) for requirement in requirements)
    return {match.group() for match in matches if match} - {OWN_NAME}


def section_names(title: str) -> set[str]:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return set(TABLE_NAME.findall(section)) - {"package"}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_readme_lists_every_command() -> None:
    listed = set(re.findall(r"^\| `albatross (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    registered = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert listed == registered | {str(group.name) for group in app.registered_groups}


@pytest.mark.parametrize(
    ("title", "requirements"),
    [
        ("At run time", project()["project"]["dependencies"]),
        ("To build", project()["build-system"]["requires"]),
        ("To test and check", project()["project"]["optional-dependencies"]["test"]),
    ],
)
def test_every_dependency_has_a_licence_and_a_reason(title: str, requirements: list[str]) -> None:
    assert section_names(title) == requirement_names(requirements)


def test_every_dependency_of_wheel_building_has_a_licence_and_a_reason() -> None:
    wanted = requirement_names(project()["project"]["optional-dependencies"]["dev"])
    assert section_names("To build wheels for others") == wanted - section_names("To build")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


def test_make_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in MAKE_CALL.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert named <= targets
