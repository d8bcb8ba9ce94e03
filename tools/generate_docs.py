"""Writes the documentation that is made from the code: docs/configuration.md, and the field tables of docs/api.md.

`--check` writes nothing and fails if a page is not what the code says; the tests use it.
"""

import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from albatross.cli.options import SAMPLING_HELP, bounds, flag, sampling_fields
from albatross.config import EngineConfig, ModelProfile, ServerConfig
from albatross_server.requests import MUST_BE_NEUTRAL, WITHOUT_EFFECT, ChatBody, CompletionBody, GenerationBody

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- fields: made by tools/generate_docs.py from server/requests.py -->", "<!-- end of fields -->"

INTRODUCTION = """# Configuration

<!-- Made by tools/generate_docs.py from python/albatross/config.py. Change that file, then run `make docs`. -->

A setting is a keyword (`LLM(max_num_seqs=8)`), a flag (`--max-num-seqs 8`) or an environment variable
(`ALBATROSS_MAX_NUM_SEQS=8`). A keyword or flag wins over the variable, the variable over the default. What is on
by default has a flag that switches it off (`--no-cuda-graphs`). A value of the wrong
type or out of its range is refused at the start, with the setting's name.
"""

PROFILE = """## Model profile

How a checkpoint wants to be spoken to: a JSON file beside it, named like it (`my-model.pth` and `my-model.json`). A request's
own fields win over it. Without a file the defaults hold; they are those of the RWKV-7 G1 models.

| field | default | meaning |
|---|---|---|
"""

PROFILE_MEANING = {
    "chat_stop": "Texts that end a chat answer.",
    "chat_sampling": "Sampling parameters of a chat request that does not set them.",
}

SAMPLING = """## Sampling flags

`albatross generate` and `albatross chat` take these. The HTTP API has fields of the same names ([API](api.md)).

| flag | meaning |
|---|---|
"""


def configuration_page() -> str:
    """docs/configuration.md as the schemas say it."""
    sections = [
        INTRODUCTION,
        settings_table("Engine", EngineConfig, "Taken by `serve`, `generate`, `chat` and `batch`, and by `LLM`."),
        settings_table("Server", ServerConfig, "Taken by `serve`."),
        SAMPLING + "".join(f"| `{flag(field.name)}` | {cell(SAMPLING_HELP[field.name])} |\n" for field in sampling_fields()),
        PROFILE + "".join(profile_row(name, field.default) for name, field in ModelProfile.model_fields.items()),
    ]
    return "\n".join(sections)


def settings_table(title: str, schema: type[EngineConfig] | type[ServerConfig], note: str) -> str:
    head = f"## {title}\n\n{note}\n\n| setting | default | bounds | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{name}` | {shown(field.default)} | {limits(field)} | {cell(field.description or '')} |\n"
        for name, field in schema.model_fields.items()
    )


def profile_row(name: str, default: Any) -> str:
    return f"| `{name}` | {shown(default)} | {PROFILE_MEANING[name]} |\n"


def shown(value: Any) -> str:
    return "none" if value is None or value == "" else f"`{cell(str(value))}`"


def limits(field: Any) -> str:
    found = bounds(field)
    texts = [f"{'from' if key == 'min' else 'to'} {limit}" for key, limit in found.items()]
    above = [f"above {mark.gt}" for mark in field.metadata if getattr(mark, "gt", None) is not None]
    return " ".join(texts + above)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def api_page() -> str:
    """docs/api.md with its field tables as the request schemas say them; the text around them is kept."""
    before, _, rest = (DOCS / "api.md").read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n\n" + field_tables() + "\n" + END + rest.partition(END)[2]


def field_tables() -> str:
    known = MUST_BE_NEUTRAL.keys() & CompletionBody.model_fields.keys()
    sections = [
        field_table("Both routes", GenerationBody, ()),
        field_table("Chat completions", ChatBody, GenerationBody.model_fields),
        field_table("Completions", CompletionBody, GenerationBody.model_fields),
        "### Accepted without effect\n\n" + names(WITHOUT_EFFECT),
        "### Refused unless they change nothing\n\n" + names(MUST_BE_NEUTRAL) + "\nBut completions take these: " + names(known),
    ]
    return "\n".join(sections)


def field_table(title: str, schema: type[GenerationBody], but: Container[str]) -> str:
    rows = (
        f"| `{name}` | {cell(field.description or '')} |\n" for name, field in schema.model_fields.items() if name not in but
    )
    return f"### {title}\n\n| field | meaning |\n|---|---|\n" + "".join(rows)


def names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields)) + "\n"


def main() -> int:
    """Writes the pages, or with --check says which differ; the number of those is the exit code."""
    num_wrong = 0
    for path, text in {DOCS / "configuration.md": configuration_page(), DOCS / "api.md": api_page()}.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"docs/{path.name} is not what the code says; run `make docs`.\n")
            num_wrong += 1
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
