"""What mkdocs asks for besides the pages in docs/: those that come from code, and how docstrings are shown.

The README is the first page, CONTRIBUTING and CHANGELOG are pages; the op reference, the commands and the tables of
formats and records are made from the package itself, so that they cannot say anything else.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from kvbackend import cli, formats, ops

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    made = {target: _page(ROOT / source) for source, target in COPIED.items()}
    made |= {"ops.md": "\n".join(_ops()), "commands.md": "\n".join(_commands())}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put the tables where a page asks for them; links to files that are no pages lead to the repository."""
    if page.file.src_uri == "formats.md":
        markdown = markdown.replace("<!-- formats -->", "\n".join(_formats()))
        markdown = markdown.replace("<!-- records -->", "\n".join(_records()))
    return re.sub(r"\]\((?:\.\./)(?!docs/)([\w./-]+)\)", lambda link: _outside(link.group(1)), markdown)


def _page(path: Path) -> str:
    """A page of the repository's root, its links as they are seen from docs/."""
    text = path.read_text("utf-8")
    for source, target in COPIED.items():
        text = re.sub(rf"\]\({re.escape(source)}(?=[)#])", f"]({target}", text)
    return text.replace("](docs/", "](")


def _outside(path: str) -> str:
    return f"]({COPIED[path]})" if path in COPIED else f"](https://github.com/kvbackend/kvbackend/blob/main/{path})"


def _ops() -> Iterator[str]:
    yield "# Ops\n"
    yield "Each is `kvbackend.ops.<name>` and `torch.ops.kvbackend.<name>`. The source shown is the reference: what the"
    yield "op is. [Conventions](conventions.md) hold for all of them.\n"
    groups: dict[str, list[str]] = {}
    for name, found in sorted(ops.registry.items()):
        groups.setdefault(found.group, []).append(name)
    for group, names in groups.items():
        yield f"## {group[0].upper()}{group[1:]}\n"
        for name in names:
            yield f"::: kvbackend.ops.{name}.{name}\n"


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    for name, (module, summary) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(
            prog=f"kvbackend {name}", description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=110, max_help_position=34),
        )  # fmt: skip
        import_module(module).add_arguments(parser)
        yield f"## {name}\n\n```text\n{parser.format_help()}```\n"


def _formats() -> Iterator[str]:
    yield "| format | bits | codes in | one scale for | scales in | granularities | bytes of a token, 8 x 128 |"
    yield "|---|---|---|---|---|---|---|"
    for name in formats.names():
        fmt = formats.get(name)
        covered = (
            f"{fmt.group} {'tokens or channels' if fmt.granularity == 'kivi' else 'channels'}" if fmt.group else ""
        )
        covered = covered or {"none": "", "token_head": "token and head"}.get(fmt.granularity, fmt.granularity)
        scale = "" if fmt.scale_dtype is None else f"{fmt.scale_dtype}{' pair' if fmt.scale_parts == 2 else ''}"
        choices = ", ".join(f"`{choice}`" for choice in fmt.choices)
        size = fmt.bytes_per_token(8, 128)
        yield f"| `{name}` | {fmt.bits} | {fmt.storage} | {covered} | {scale} | {choices} | {size:g} |"


def _records() -> Iterator[str]:
    """A diagram for each record, in bytes from the start of a row."""
    for name in formats.record_names():
        record = formats.record(name)
        yield f"### `{name}`\n\n{record.source}.\n\n```text"
        for i, plane in enumerate(record.planes):
            if len(record.planes) > 1:
                yield f"{('data', 'scale')[i]} plane, {record.plane_bytes[i]} bytes a row"
            start = 0
            for field in plane:
                end = start + field.bytes - 1
                yield f"{start:5d} - {end:<5d} {field.name:7s} {field.count:4d} x {field.dtype}"
                start += field.bytes
        padding = f", padded to a multiple of {record.page_align}" if record.page_align > 1 else ""
        yield f"a row: {record.row_bytes} bytes; a page of 64: {record.page_bytes(64)} bytes{padding}\n```\n"


class Fenced(griffe.Extension):
    """Docstrings are plain text with columns: what follows the first paragraph is shown as it stands."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence all but the first paragraph of a docstring."""
        if obj.docstring is None:
            return
        first, _, rest = obj.docstring.value.partition("\n\n")
        obj.docstring.value = first + (f"\n\n```text\n{rest.strip()}\n```" if rest.strip() else "")
