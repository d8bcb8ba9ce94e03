"""Holds the layer table of docs/architecture.md: who may import whom, and who must not know torch, asyncio or FastAPI."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"albatross": ROOT / "python" / "albatross", "albatross_server": ROOT / "server"}
IMPORT_LIMIT_S = 0.15

BASE = ("albatross.constants", "albatross.errors")
SETTINGS = ("albatross.config", "albatross.sampling_params", "albatross.tokenizer")
BUILD = ("albatross.build",)
OPS, REFERENCE, MODELS = ("albatross.ops",), ("albatross.reference",), ("albatross.models",)
CONTROL = tuple(
    f"albatross.engine.{name}"
    for name in ("messages", "request", "scheduler", "pacing", "sizes", "packing", "router", "status")
)
COMPUTE = tuple(f"albatross.engine.{name}" for name in ("model_runner", "graphs", "staging", "sampler", "scoring", "core"))
FRONT = (
    *(
        f"albatross.engine.{name}"
        for name in ("process", "supervisor", "worker", "client", "output_processor", "prompt_logprobs")
    ),
    "albatross.llm",
    "albatross.runner",
)
WEB = ("fastapi", "starlette", "uvicorn")


@dataclass(frozen=True)
class Row:
    """One row of the table. Its members may import each other, `allowed`, and packages that are not ours."""

    members: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()  # wins over `allowed`
    only_packages: tuple[str, ...] | None = None  # the only packages beyond the standard library; None: any


ROWS = (
    Row(BASE, only_packages=()),
    Row(SETTINGS, BASE, ("torch", "asyncio", *WEB)),
    Row(BUILD, BASE, only_packages=()),
    Row(OPS, BASE + BUILD, only_packages=("torch",)),
    Row(REFERENCE, BASE, only_packages=("torch",)),
    Row(MODELS, BASE + SETTINGS + OPS + REFERENCE, ("asyncio", *WEB)),
    Row(CONTROL, BASE + SETTINGS, ("torch", "asyncio", "albatross.tokenizer", *WEB)),
    Row(COMPUTE, BASE + SETTINGS + OPS + REFERENCE + MODELS + CONTROL, ("asyncio", "albatross.tokenizer", *WEB)),
    Row(FRONT, BASE + SETTINGS + OPS + REFERENCE + MODELS + CONTROL + COMPUTE, WEB),
    Row(("albatross_server",), (*BASE, *SETTINGS, "albatross.engine.client"), ("torch",)),
    Row(("albatross.cli", "albatross.__main__", "albatross.__init__"), ("albatross", "albatross_server")),
)
ANYWHERE = ("albatross.__version__",)
OP = "albatross.ops."


def modules() -> dict[str, Path]:
    """Every module of both packages by its full name; empty `__init__` files, which belong to no layer, are left out."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            if path.name != "__init__.py" or imports(module, path):
                found[module] = path
    return found


def imports(module: str, path: Path) -> set[str]:
    """Full names of everything the file imports, at its top or later."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            source = ".".join(filter(None, (*parents, node.module)))
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def row_of(module: str) -> Row | None:
    return next((row for row in ROWS if is_within(module, row.members)), None)


def is_allowed(module: str, row: Row, name: str) -> bool:
    if is_within(name, row.forbidden):
        return False
    package = name.partition(".")[0]
    if package in PACKAGES:
        # The CPU dispatch of an op is its reference function, which stands in a file of the same name.
        own_reference = (REFERENCE[0] + "." + module.removeprefix(OP),) if module.startswith(OP) else ()
        return is_within(name, row.members + row.allowed + ANYWHERE + own_reference)
    return row.only_packages is None or package in row.only_packages or package in sys.stdlib_module_names


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    row = row_of(module)
    assert row is not None, f"{module} stands in no row of the layer table"
    wrong = sorted(name for name in imports(module, modules()[module]) if not is_allowed(module, row, name))
    assert not wrong, f"{module} may not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("albatross.engine.scheduler", "torch.Tensor"),
        ("albatross.engine.core", "albatross.tokenizer.world"),
        ("albatross.engine.core", "asyncio"),
        ("albatross.engine.client", "fastapi.FastAPI"),
        ("albatross.constants", "msgspec"),
        ("albatross.reference.wkv7", "albatross.ops.wkv7"),
        ("albatross.ops.wkv7", "albatross.reference.rwkv7"),
        ("albatross_server.app", "torch"),
        ("albatross_server.app", "albatross.engine.core.EngineCore"),
    ],
)
def test_the_table_refuses_an_import_across_layers(module: str, name: str) -> None:
    row = row_of(module)
    assert row is not None
    assert not is_allowed(module, row, name)


def test_a_module_that_stands_in_no_row_is_found() -> None:
    assert row_of("albatross.engine.unheard_of") is None


@pytest.mark.parametrize("module", ["albatross", "albatross.cli.main", "albatross.engine.client", "albatross_server"])
def test_importing_a_front_module_loads_no_torch(module: str) -> None:
    assert run(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_import_albatross_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import albatross; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < IMPORT_LIMIT_S
