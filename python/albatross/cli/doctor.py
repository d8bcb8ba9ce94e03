"""`albatross doctor`: what this machine has, which native library would be used and why, and what to mend.

`collect_report` gathers plain data (`--json` prints it as it is), `render_report` shows it. Works without a GPU, without a
driver, and where torch is missing or broken, since that is when somebody asks. Knows nothing of models but which kernels
were chosen for them.
"""

import importlib.metadata
import itertools
import operator
import os
import platform
import re
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from albatross import __version__

if TYPE_CHECKING:
    from albatross.ops import _driver, _loader

DISTRIBUTION = "albatross-rwkv"
Report = dict[str, Any]


def collect_report() -> Report:
    """Everything known about this installation, as JSON-ready data. Opens no library and allocates nothing on a card."""
    return {
        "albatross": __version__,
        "machine": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": _package_versions(),
        **_native_report(),
    }


def _native_report() -> Report:
    try:
        import torch
    except (ImportError, OSError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        problem = "torch is not installed" if is_missing else f"torch does not import ({error})"
        return _report_without_torch(f"{problem}: run pip install --force-reinstall 'torch>=2.10'.")
    from albatross.ops import _driver, _loader

    everything = _loader.current_context()
    candidates = _loader.find_candidates()
    decisions = {card.index: _loader.select(_loader.current_context(card.index), candidates) for card in everything.cards}
    decision = decisions[0] if decisions else _loader.select(everything, candidates)
    backend = _automatic_backend(everything, decision)
    return {
        "torch": {"version": str(torch.__version__), "cuda": torch.version.cuda, "problem": None},
        "driver": {"release": _driver.driver_release(), "cuda": _dotted(everything.driver_cuda)},
        "cards": [
            {"index": card.index, "name": card.name, "sm": card.sm, "rejection": _rejection(decisions[card.index])}
            for card in everything.cards
        ],
        "workers": _worker_devices(everything, decisions),
        "native_library": _library_report(candidates, decision),
        "candidates": [
            {
                "origin": verdict.candidate.origin,
                "path": str(verdict.candidate.path) if verdict.candidate.path else None,
                "rejection": verdict.rejection,
            }
            for verdict in decision.verdicts
        ],
        "kernel_choices": [
            {"card": card.index, **_kernel_choices(card, library)}
            for card in everything.cards
            if (library := decisions[card.index].chosen) is not None
        ],
        "backend": backend,
        "suggestions": _suggestions(everything, decisions, backend),
    }


def _report_without_torch(problem: str) -> Report:
    return {
        "torch": {"version": None, "cuda": None, "problem": problem},
        "driver": None,
        "cards": [],
        "workers": [],
        "native_library": {"name": None, "problem": "Not looked at, because torch is needed to use it."},
        "candidates": [],
        "kernel_choices": [],
        "backend": {"auto": None, "reason": problem},
        "suggestions": [problem],
    }


def _library_report(candidates: "tuple[_loader.Candidate, ...]", decision: "_loader.Decision") -> Report:
    """The library that is used, or else the first that exists."""
    from albatross.ops._loader import LIBRARY_NAME

    found = decision.chosen or next((candidate for candidate in candidates if candidate.build), None)
    if found is None or found.build is None:
        return {"name": LIBRARY_NAME, "path": None, "problem": candidates[0].problem}
    build = found.build
    return {
        "name": LIBRARY_NAME,
        "path": str(found.path),
        "archs": list(build.arch),
        "ptx": list(build.ptx),
        "sha256": found.sha256,
        "cuda_toolkit": build.cuda_toolkit,
        "torch_min": build.torch_min,
        "torch_built_with": build.torch_built_with,
        "driver_min": build.driver_min,
        "problem": _rejection(decision),
    }


def _kernel_choices(card: "_driver.Card", library: "_loader.Candidate") -> Report:
    """Which kernel computes which matrix product on this card, and who says so."""
    from albatross.models.tuning import load_tuning

    return load_tuning(card.name, card.capability, library.sha256 or "").describe()


def _worker_devices(context: "_loader.Context", decisions: "dict[int, _loader.Decision]") -> list[str]:
    """Where workers 0, 1, ... would run: the cards in order, up to the first that cannot be used. Empty on the CPU."""
    usable = itertools.takewhile(lambda card: decisions[card.index].chosen, context.cards)
    return [f"cuda:{card.index}" for card in usable]


def _automatic_backend(context: "_loader.Context", decision: "_loader.Decision") -> Report:
    """What `--device auto --backend auto` comes to on this machine."""
    if context.torch_cuda is None:
        return {"auto": "reference", "reason": f"torch {context.torch_version} was built without CUDA, so models run on the CPU."}
    if not context.cards:
        return {"auto": "reference", "reason": "No CUDA card is visible, so models run on the CPU."}
    if decision.chosen is not None:
        return {"auto": "native", "reason": f"Models run on {context.cards[0].name} with the native library."}
    return {"auto": None, "reason": _rejection(decision)}


def _suggestions(context: "_loader.Context", decisions: "dict[int, _loader.Decision]", backend: Report) -> list[str]:
    if context.cards and context.torch_cuda is None:
        return [f"{context.cards[0].name} lies idle: install a CUDA build of torch (pip install --force-reinstall torch)."]
    problems = [_rejection(decision) for decision in decisions.values()]
    unique = dict.fromkeys(problem for problem in problems if problem is not None)
    return [*unique, *(["Until then: --backend reference, or --device cpu."] if backend["auto"] is None else [])]


def _rejection(decision: "_loader.Decision") -> str | None:
    return None if decision.chosen else str(decision.error())


def _package_versions() -> dict[str, str | None]:
    """Installed versions of what the package depends on; empty where it runs from a work tree that is not installed."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = [re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0] for line in requirements if "extra ==" not in line]
    return {name: _version_of(name) for name in names}


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"


def render_report(report: Report, console: Console | None = None) -> None:
    """Show a report to a person."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(report):
        table.add_row(Text(name), Text(text))
    (console or Console()).print(table)


def _lines(report: Report) -> list[tuple[str, str]]:
    machine, python, torch, library = report["machine"], report["python"], report["torch"], report["native_library"]
    packages = [f"{name} {version or '(missing)'}" for name, version in report["packages"].items()]
    cards = [
        f"{card['index']}: {card['name']}, {card['sm']}" + (" (cannot be used)" if card["rejection"] else "")
        for card in report["cards"]
    ]
    lines = [
        ("albatross", report["albatross"]),
        ("machine", f"{machine['system']}, {machine['machine']}, {machine['cores']} cores"),
        ("python", f"{python['version']} ({python['executable']})"),
        ("torch", torch["problem"] or f"{torch['version']}, {'CUDA ' + torch['cuda'] if torch['cuda'] else 'without CUDA'}"),
        ("driver", _driver_text(report["driver"])),
        ("cards", "\n".join(cards) or ("no GPU" if report["driver"] else "not asked")),
        *([("workers", f"up to {len(report['workers'])}: {', '.join(report['workers'])}")] if report["workers"] else []),
        ("native library", library["name"] or library["problem"]),
    ]
    if library.get("path"):
        lines += [
            ("  file", library["path"]),
            ("  built for", ", ".join([*library["archs"], *(f"PTX {name}" for name in library["ptx"])])),
            ("  built with", f"CUDA {library['cuda_toolkit']}, torch {library['torch_built_with']}"),
            ("  needs", f"torch {library['torch_min']}, driver {library['driver_min']}"),
            ("  sha256", library["sha256"]),
        ]
    for candidate in report["candidates"]:
        lines.append((f"  {candidate['origin']}", candidate["rejection"] or "chosen"))
    for choices in report["kernel_choices"]:
        lines += _choice_lines(choices)
    lines.append(("backend", f"auto is {report['backend']['auto'] or 'refused'}: {report['backend']['reason']}"))
    lines.append(("packages", ", ".join(packages) or "not installed as a package: runs from a work tree"))
    lines += [("to do", text) for text in report["suggestions"]]
    return lines


def _choice_lines(choices: Report) -> list[tuple[str, str]]:
    """What was measured and what is shipped, by the N x K of a matrix and up to how many rows of input."""
    rules = [(rule["choice"], "beyond" if rule["max_rows"] is None else f"to {rule['max_rows']}") for rule in choices["rules"]]
    cache = choices["cache"] or "no file, since this user has no home folder"
    lines = [
        (f"kernels of card {choices['card']}", f"measured: {choices['num_measured']} in {cache}"),
        (f"  by {choices['defaults']}'s rule", ", ".join(map(" ".join, rules))),
    ]
    for source in ("shipped", "measured"):
        lines += [(f"  {shape} {source}", _spans(by_rows)) for shape, by_rows in choices[source].items()]
    return lines


def _spans(by_rows: dict[str, str]) -> str:
    """Choices by ascending numbers of rows as "rows to 64, cublas to 960"."""
    groups = itertools.groupby(by_rows.items(), key=operator.itemgetter(1))
    return ", ".join(f"{choice} to {list(group)[-1][0]}" for choice, group in groups)


def _driver_text(driver: Report | None) -> str:
    if driver is None:
        return "not asked"
    return f"{driver['release'] or 'release unknown'}, up to CUDA {driver['cuda']}" if driver["cuda"] else "none found"
