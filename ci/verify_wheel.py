"""Checks finished wheels and notes in manifest/checks.json how far each library was seen to work.

    python ci/verify_wheel.py [--torch VERSION|PYTHON]... [--link VERSION]... [--only PART] [--rebuild] dist/*.whl

Parts: static (the archive, auditwheel's platform, symbols, machine code) and load (in fresh environments with one torch each,
which are made under build/envs where they are missing; or over the torch of the interpreter that is named). static looks for
all symbols in each torch that was unpacked under build/torch; --link 2.10 gets another one there. --rebuild builds each wheel
again in another folder. Ends with a table; the exit code is 1 if anything failed.
"""

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import rebuild
import wheel_checks
from build_inputs import BUILD, Inputs
from evidence import CHECKS, write_checks
from matrix import read_matrix
from rich.console import Console
from rich.table import Table
from rich.text import Text
from wheel_checks import Finding
from wheel_file import Wheel, WheelError, extract_native, read_wheel

PARTS = ("static", "load")


def verify(wheel: Wheel, parts: Sequence[str], torches: list[str]) -> Iterator[Finding]:
    """All findings about one wheel, each as soon as it is there."""
    if wheel.library_sha256 is None:
        yield Finding("library", False, f"It has none, because {wheel.build['why']}.")
        return
    with tempfile.TemporaryDirectory() as folder:
        library = extract_native(wheel.path, Path(folder))
        if "static" in parts:
            yield wheel_checks.check_archive(wheel)
            yield wheel_checks.check_asked(wheel, read_matrix())
            yield wheel_checks.check_platform(wheel)
            yield from wheel_checks.check_library_file(wheel, library)
            links = (wheel_checks.check_link(wheel, library, torch) for torch in sorted((BUILD / "torch").glob("*/torch")))
            yield from filter(None, links)
        if "load" in parts:
            found = []
            for name in wheel_checks.torches_of(wheel, torches):
                for finding in wheel_checks.check_in_torch(wheel, library, name):
                    found.append(finding)
                    yield finding
            yield from wheel_checks.check_schemas(found)
    if "rebuild" in parts:
        yield rebuild.check_rebuild(wheel)


def note_evidence(path: Path, found: Sequence[tuple[Wheel, Finding]], what: str) -> None:
    """Bring checks.json up to date. Where a check failed, nothing stays of what was seen there."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    noted = [(wheel_checks.evidence_of(wheel, finding, date, what), finding.is_good) for wheel, finding in found]
    good = [check for check, is_good in noted if check is not None and is_good]
    write_checks(path, good, [check.place for check, is_good in noted if check is not None and not is_good])


def show(console: Console, rows: Sequence[tuple[str, Finding]]) -> None:
    table = Table("wheel", "check", "", "found", title="Wheels")
    table.columns[3].overflow = "fold"
    before = None
    for name, finding in rows:
        mark = Text("good", style="green") if finding.is_good else Text("BAD", style="bold red")
        table.add_row(Text("" if name == before else name), Text(finding.subject), mark, Text(finding.text))
        before = name
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--torch", action="append", default=[], metavar="VERSION|PYTHON", help="load in this one (repeatable)")
    parser.add_argument("--only", choices=PARTS, help="do this part alone")
    parser.add_argument("--rebuild", action="store_true", help="build each wheel again in another folder")
    parser.add_argument("--checks", type=Path, default=CHECKS, help="the file to note the levels in")
    parser.add_argument("--link", action="append", default=[], metavar="VERSION", help="look for symbols in it (repeatable)")
    options = parser.parse_args(arguments)
    if options.link:
        inputs = Inputs(read_matrix())
        for version in options.link:
            inputs.torch(version)
    parts = [options.only] if options.only else [*PARTS]
    parts += ["rebuild"] if options.rebuild else []
    rows: list[tuple[str, Finding]] = []
    evidence: list[tuple[Wheel, Finding]] = []
    for path in options.wheels:
        try:
            wheel = read_wheel(path)
            for finding in verify(wheel, parts, options.torch):
                sys.stderr.write(f"{path.name}: {finding.subject}: {'good' if finding.is_good else 'BAD'}\n")
                rows.append((path.name, finding))
                evidence.append((wheel, finding))
        except WheelError as error:
            rows.append((path.name, Finding("archive", False, str(error))))
    note_evidence(options.checks, evidence, "python ci/verify_wheel.py")
    # The table has to tell everything also where nobody resizes a window: in a log.
    show(Console(width=None if sys.stdout.isatty() else 200), rows)
    return 0 if all(finding.is_good for _, finding in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
