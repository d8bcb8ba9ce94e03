"""The static package index: what stands in it, and that pip installs from it over a web server."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import make_index
import pytest
from wheel_cases import CLASSIC, STABLE, make_wheel
from wheel_file import Wheel, read_metadata, sha256_of

IS_LINUX = sys.platform.startswith("linux") and os.uname().machine == "x86_64"
needs_linux = pytest.mark.skipif(not IS_LINUX, reason="the wheels are for x86-64 Linux")
JSON_TYPE = "application/vnd.pypi.simple.v1+json"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the JSON page to a client that prefers it, where `speaks_json` is set."""

    speaks_json = False

    def do_GET(self) -> None:
        self.is_json = self.speaks_json and self.path.endswith("/") and JSON_TYPE in self.headers.get("Accept", "")
        if self.is_json:
            self.path += "index.json"
        super().do_GET()

    def guess_type(self, path: "str | os.PathLike[str]") -> str:
        return JSON_TYPE if self.is_json else super().guess_type(path)

    def log_message(self, format: str, *args: object) -> None:
        self.server.requested.append(self.path)  # type: ignore[attr-defined]


class Site:
    """A web server over one folder; `requested` holds the paths that were asked for."""

    def __init__(self, folder: Path, *, speaks_json: bool = False) -> None:
        handler = type("Handler", (Handler,), {"speaks_json": speaks_json})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
        self.requested: list[str] = []
        self._server.requested = self.requested  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def wheels(tmp_path: Path) -> list[Wheel]:
    return [make_wheel(tmp_path / "dist", cell) for cell in (STABLE, CLASSIC)]


@pytest.fixture
def index(wheels: list[Wheel], tmp_path: Path) -> Path:
    make_index.write_index(wheels, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture(params=[False, True], ids=["html", "json"])
def site(index: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(index, speaks_json=request.param)
    yield site
    site.close()


def pip_install(environment: Path, url: str) -> "subprocess.CompletedProcess[str]":
    """Install albatross-rwkv from that index alone, whatever pip is set up for on this machine."""
    venv.create(environment, with_pip=False)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--index-url", f"{url}/", "albatross-rwkv"]
    variables |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=110)


@needs_linux
def test_pip_installs_the_wheel_into_an_empty_environment(site: Site, tmp_path: Path) -> None:
    done = pip_install(tmp_path / "env", f"{site.url}/cu130")
    assert done.returncode == 0, done.stderr
    assert f"albatross-rwkv-0.1.0+{STABLE.label}" in done.stdout
    (installed,) = (tmp_path / "env").glob("lib/python3*/site-packages/albatross/_native/*.so")
    assert installed.read_bytes() == b"stand-in"
    assert any(path.endswith(".whl.metadata") for path in site.requested)


@needs_linux
def test_pip_refuses_a_wheel_that_was_changed_on_the_server(site: Site, index: Path, tmp_path: Path) -> None:
    (wheel,) = (index / "cu130" / "albatross-rwkv").glob("*.whl")
    content = wheel.read_bytes()
    wheel.unlink()
    wheel.write_bytes(content.replace(b"stand-in", b"stand-on"))
    done = pip_install(tmp_path / "env", f"{site.url}/cu130")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_wheel_for_one_torch_has_an_index_of_its_own(index: Path) -> None:
    assert {path.name for path in index.iterdir()} == {"cu130", "cu130-torch211"}


def test_both_pages_name_each_wheel_with_its_digest(index: Path, wheels: list[Wheel]) -> None:
    page = index / "cu130" / "albatross-rwkv"
    content, text = json.loads((page / "index.json").read_text()), (page / "index.html").read_text()
    (file,) = content["files"]
    assert (file["filename"], file["size"]) == (wheels[0].path.name, wheels[0].size_bytes)
    assert file["hashes"] == {"sha256": wheels[0].sha256}
    assert (content["name"], content["versions"]) == ("albatross-rwkv", [wheels[0].version])
    assert content["meta"] == {"api-version": "1.1"}
    assert f'#sha256={wheels[0].sha256}"' in text
    assert 'data-requires-python="&gt;=3.10"' in text


def test_the_metadata_stands_beside_the_wheel_with_its_digest(index: Path, wheels: list[Wheel]) -> None:
    page = index / "cu130" / "albatross-rwkv"
    metadata = (page / f"{wheels[0].path.name}.metadata").read_bytes()
    assert metadata == read_metadata(wheels[0].path)
    (file,) = json.loads((page / "index.json").read_text())["files"]
    assert file["core-metadata"] == {"sha256": sha256_of(metadata)}


def test_the_root_lists_the_project(index: Path) -> None:
    assert json.loads((index / "cu130" / "index.json").read_text())["projects"] == [{"name": "albatross-rwkv"}]
    assert '<a href="albatross-rwkv/">' in (index / "cu130" / "index.html").read_text()


def test_writing_it_again_removes_what_is_no_longer_there(index: Path, wheels: list[Wheel]) -> None:
    make_index.write_index(wheels[:1], index)
    assert {path.name for path in index.iterdir()} == {"cu130"}


def test_the_command_leaves_out_a_wheel_without_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(tmp_path, STABLE, label="")
    monkeypatch.setattr(sys, "argv", ["make_index", "--dist", str(tmp_path)])
    assert make_index.main() == 0
    assert "is left out: its version is 0.1.0" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
