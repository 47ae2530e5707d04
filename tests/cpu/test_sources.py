"""What the compiler cannot tell of csrc: each of its files sees only itself."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
TYPE = re.compile(r"^(?:struct|class|union|enum class) (\w+)(?: final)?(?: :.*)? \{", re.MULTILINE)


def named(text: str) -> set[str]:
    """The types that a file defines for all who are linked with it: not those of an anonymous namespace."""
    shared = re.sub(r"^namespace \{.*?^\}  // namespace$", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(TYPE.findall(shared))


def test_no_two_files_have_types_of_one_name() -> None:
    # Their constructors would be one for the linker, which keeps the first: the other type's objects are overrun.
    files = defaultdict(set)
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        if path.parts[-2] in ("cpu", "common"):  # linked to one library; csrc/cuda and csrc/npu are others
            for name in named(path.read_text()):
                files[name].add(path.name)
    assert len(files) > 50
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_types_are_found() -> None:
    source = "struct A {\nnamespace {\n\nclass B {\n};\n\n}  // namespace\nclass C : public A {\nenum class D {"
    assert named(source) == {"A", "C", "D"}
