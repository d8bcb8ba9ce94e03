"""The kernels as HIP compiles them: ci/check_hip.sh for each kind of AMD card where its compiler is installed, and csrc/hip's
headers on host threads (hip_host/), which no card is needed for. Whether an AMD card agrees, nothing here can say.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from albatross import constants

ROOT = Path(__file__).parents[2]
HOST = Path(__file__).parent / "hip_host"
COMPILERS = {"gfx90a": "hipcc", "gfx1030": "hipcc", "gfx1100": "clang-19", "gfx942": "clang-19"}
CUDA_ALONE = {"tmix_prefill.cu"}
KERNELS = sorted({path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu")} - CUDA_ALONE)
# The width of a wave, and the macro by which a compiler names the card: one each for every way to multiply in csrc/hip/mma.cuh,
# and for both widths without matrix instructions.
CARDS = {
    "lanes-of-32": ("32", "__gfx1030__"),
    "lanes-of-64": ("64", "__gfx906__"),
    "mfma-fp32": ("64", "__gfx90a__"),
    "mfma-fp16": ("64", "__gfx942__"),
    "wmma": ("32", "__GFX11__"),
}

needs_host_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which was not found")


def require_compiler(target: str) -> None:
    if shutil.which(COMPILERS[target]) is None:
        pytest.skip(f"{target} is compiled by {COMPILERS[target]}, which was not found")


def check_hip(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "ci" / "check_hip.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=580)


@pytest.fixture(scope="module")
def includes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The include path of a kernel, with the generated header of shared numbers."""
    folder = tmp_path_factory.mktemp("generated")
    template = (ROOT / "csrc" / "constants.h.in").read_text()
    (folder / "constants.h").write_text(re.sub(r"@(\w+)@", lambda match: str(getattr(constants, match[1])), template))
    return [f"-I{path}" for path in (HOST, ROOT / "csrc" / "hip", ROOT / "csrc", ROOT / "csrc" / "cuda", folder)]


def run_on_host(card: str, sources: list[Path], includes: list[str], program: Path) -> None:
    """Compiles the sources for host threads that act as this card's lanes, and runs them; fails with what they say."""
    wave, macro = CARDS[card]
    # Fibers jump between stacks, which a fortified libc takes for an attack.
    flags = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-fno-extern-tls-init", "-U_FORTIFY_SOURCE"]
    defines = ["-D__HIP__", f"-DWAVE={wave}", f"-D{macro}"]
    command = ["g++", *flags, *defines, *includes, "-x", "c++", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr or f"ended with {done.returncode}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", COMPILERS)
def test_every_kernel_compiles_for_the_card(target: str) -> None:
    require_compiler(target)
    done = check_hip("--require", target)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    kind = "object" if COMPILERS[target] == "hipcc" else "assembly"
    assert rows == [[kernel, kind] for kernel in KERNELS]


@pytest.mark.parametrize("target", COMPILERS)
def test_a_kernel_that_does_not_compile_fails_the_check_with_the_compilers_words(target: str, tmp_path: Path) -> None:
    require_compiler(target)
    for name in ("ci/check_hip.sh", "csrc/constants.h.in", "python/albatross/constants.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc" / "cuda").mkdir()
    (tmp_path / "csrc" / "cuda" / "broken.cu").write_text("__global__ void kernel(int* p) { *p = unheard_of; }\n")
    done = check_hip(target, root=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].split() == ["broken.cu", "failed"]
    assert "unheard_of" in done.stderr


def test_a_missing_compiler_leaves_its_cards_unchecked_and_is_named() -> None:
    done = check_hip(HIPCC="no-hipcc", HIP_CLANG="no-clang")
    assert done.returncode == 0
    assert "gfx90a is not checked: no-hipcc was not found." in done.stdout
    assert "gfx942 is not checked: no-clang was not found." in done.stdout
    assert done.stdout.count("not checked") == len(COMPILERS) * (1 + len(KERNELS))


def test_a_missing_compiler_is_an_error_where_the_card_is_required() -> None:
    assert check_hip("--require", "gfx90a", HIPCC="no-hipcc").returncode == 1


def test_an_unknown_card_is_refused_with_those_there_are() -> None:
    done = check_hip("gfx1")
    assert done.returncode == 2
    assert "must be one of gfx90a gfx1030 gfx1100 gfx942, found 'gfx1'" in done.stderr


@needs_host_compiler
@pytest.mark.parametrize("card", CARDS)
def test_what_csrc_hip_replaces_gives_each_lane_its_numbers(card: str, includes: list[str], tmp_path: Path) -> None:
    run_on_host(card, [HOST / "check_lanes.cpp"], includes, tmp_path / "check")


@pytest.mark.slow
@needs_host_compiler
@pytest.mark.parametrize("card", CARDS)
def test_the_matrix_products_are_right_with_the_lanes_of_the_card(card: str, includes: list[str], tmp_path: Path) -> None:
    kernels = [ROOT / "csrc" / "cuda" / f"linear_{name}.cu" for name in ("rows", "sparse")]
    run_on_host(card, [HOST / "check_products.cpp", *kernels], includes, tmp_path / "check")
