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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from albatross import __version__

if TYPE_CHECKING:
    from albatross.ops import _driver, _manifest, _selection

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
    decisions = {card.index: _loader.decide(replace(everything, cards=(card,))) for card in everything.cards}
    decision = decisions[0] if decisions else _loader.decide(everything)
    backend = _automatic_backend(everything, decision)
    return {
        "torch": {"version": str(torch.__version__), "cuda": torch.version.cuda, "problem": None},
        "driver": {"release": _driver.driver_release(), "cuda": _dotted(everything.driver_cuda)},
        "cards": [_card_report(card, decisions[card.index]) for card in everything.cards],
        "workers": _worker_devices(everything, decisions),
        "environment": {name: os.environ[name] for name in _loader.VARIABLES if os.environ.get(name)},
        "native_library": _library_report(decision),
        "candidates": [_candidate_report(verdict) for verdict in decision.verdicts],
        "kernel_choices": [
            {"card": card.index, **_kernel_choices(card, library.build)}
            for card in everything.cards
            if (library := decisions[card.index].chosen) is not None and library.build is not None
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
        "environment": {},
        "native_library": {"name": None, "path": None, "problem": "Not looked at, because torch is needed to use it."},
        "candidates": [],
        "kernel_choices": [],
        "backend": {"auto": None, "reason": problem},
        "suggestions": [problem],
    }


def _card_report(card: "_driver.Card", decision: "_selection.Decision") -> Report:
    """`code` is what the driver takes of the library for this card: a later machine's PTX is compiled at the first start."""
    from albatross.ops._targets import code_for

    library = decision.chosen
    return {
        "index": card.index,
        "name": card.name,
        "sm": card.sm,
        "library": str(library.path) if library and library.path else None,
        "code": code_for(card.capability, library.build) if library and library.build else None,
        "rejection": _rejection(decision),
    }


def _candidate_report(verdict: "_selection.Verdict") -> Report:
    """The verdict for the first card."""
    candidate = verdict.candidate
    return {
        "origin": candidate.origin,
        "path": str(candidate.path) if candidate.path else None,
        "lane": candidate.build.lane if candidate.build else None,
        "targets": candidate.build.targets if candidate.build else None,
        "is_built": candidate.build is not None,
        "rejection": verdict.rejection,
    }


def _library_report(decision: "_selection.Decision") -> Report:
    """The library that is used, or else the first that exists."""
    from albatross.ops._manifest import LIBRARY_NAME

    exists = (verdict.candidate for verdict in decision.verdicts if verdict.candidate.build)
    found = decision.chosen or next(exists, None)
    if found is None or found.build is None:
        return {"name": LIBRARY_NAME, "path": None, "problem": _rejection(decision)}
    build = found.build
    return {
        "name": build.name,
        "version": build.version,
        "lane": build.lane,
        "origin": found.origin,
        "path": str(found.path),
        "archs": list(build.arch),
        "ptx": list(build.ptx),
        "ops": list(build.ops),
        "sha256": build.sha256,
        "source": build.source,
        "platform": build.platform,
        "python_abi": build.python_abi,
        "cuda_toolkit": build.cuda_toolkit,
        "torch_abi": build.torch_abi,
        "torch_min": build.torch_min,
        "torch_max": build.torch_max,
        "torch_built_with": build.torch_built_with,
        "driver_min": build.driver_min,
        "problem": _rejection(decision),
    }


def _kernel_choices(card: "_driver.Card", build: "_manifest.Build") -> Report:
    """Which kernel computes which matrix product on this card, and who says so."""
    from albatross.models.tuning import load_tuning

    return load_tuning(card.name, card.capability, build.sha256).describe()


def _worker_devices(context: "_selection.Context", decisions: "dict[int, _selection.Decision]") -> list[str]:
    """Where workers 0, 1, ... would run: the cards in order, up to the first that cannot be used. Empty on the CPU."""
    usable = itertools.takewhile(lambda card: decisions[card.index].chosen, context.cards)
    return [f"cuda:{card.index}" for card in usable]


def _automatic_backend(context: "_selection.Context", decision: "_selection.Decision") -> Report:
    """What `--device auto --backend auto` comes to on this machine."""
    if context.torch_cuda is None:
        return {"auto": "reference", "reason": f"torch {context.torch_version} was built without CUDA, so models run on the CPU."}
    if not context.cards:
        return {"auto": "reference", "reason": "No CUDA card is visible, so models run on the CPU."}
    if decision.chosen is not None:
        what = "the native library" if decision.chosen.build else "a native library that is built at the first start"
        return {"auto": "native", "reason": f"Models run on {context.cards[0].name} with {what}."}
    return {"auto": None, "reason": _rejection(decision)}


def _suggestions(context: "_selection.Context", decisions: "dict[int, _selection.Decision]", backend: Report) -> list[str]:
    if context.cards and context.torch_cuda is None:
        return [f"{context.cards[0].name} lies idle: install a CUDA build of torch (pip install --force-reinstall torch)."]
    problems = [_rejection(decision) for decision in decisions.values()]
    passed_over = [str(verdict) for decision in decisions.values() for verdict in decision.passed_over]
    unique = dict.fromkeys(problem for problem in [*problems, *passed_over] if problem is not None)
    return [*unique, *(["Until then: --backend reference, or --device cpu."] if backend["auto"] is None else [])]


def _rejection(decision: "_selection.Decision") -> str | None:
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
        f"{card['index']}: {card['name']}, {card['sm']}"
        + (" (cannot be used)" if card["rejection"] else f" (runs {card['code']})" if card["code"] else "")
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
        *(_library_lines(library) if library["path"] else []),
    ]
    for candidate in report["candidates"]:
        verdict = "chosen" if candidate["is_built"] else "chosen: it is built at the first start"
        lines.append((f"  {candidate['origin']}", candidate["rejection"] or verdict))
    if report["environment"]:
        lines.append(("environment", "\n".join(f"{name}={value}" for name, value in report["environment"].items())))
    for choices in report["kernel_choices"]:
        lines += _choice_lines(choices)
    lines.append(("backend", f"auto is {report['backend']['auto'] or 'refused'}: {report['backend']['reason']}"))
    lines.append(("packages", ", ".join(packages) or "not installed as a package: runs from a work tree"))
    lines += [("to do", text) for text in report["suggestions"]]
    return lines


def _library_lines(library: Report) -> list[tuple[str, str]]:
    torch = f"torch {library['torch_min']}" + ("" if library["torch_max"] else " or later")
    python = "any Python" if library["python_abi"] == "none" else f"Python {library['python_abi']}"
    return [
        ("  file", library["path"]),
        ("  built for", ", ".join([*library["archs"], *(f"PTX {name}" for name in library["ptx"])])),
        ("  built with", f"CUDA {library['cuda_toolkit']}, torch {library['torch_built_with']}, lane {library['lane']}"),
        ("  needs", f"{torch}, {python}, driver {library['driver_min']} or newer, {library['platform']}"),
        ("  sha256", library["sha256"]),
    ]


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
