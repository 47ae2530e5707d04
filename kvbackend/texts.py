"""Real text that every Python has with it: what `kvbackend run` calibrates on and `kvbackend eval` measures on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

BUILTIN = "pydoc_data.topics"
CALIBRATION_TOKENS = 2048  # the first tokens of a text, which are never scored


def builtin() -> str:
    """The reference manual's chapters that come with Python, as one English text: about 100 000 tokens.

    A chapter that is a part of another one is left out, so that no passage is met twice.
    """
    from pydoc_data.topics import topics

    chapters = [topics[name].strip() for name in sorted(topics)]
    beginnings = [" ".join(chapter.split()[5:60]) for chapter in chapters]  # past the title, however it is wrapped
    plain = [" ".join(chapter.split()) for chapter in chapters]
    return "\n\n".join(
        chapter
        for i, chapter in enumerate(chapters)
        if not any(beginnings[i] in other for j, other in enumerate(plain) if j != i and len(other) > len(plain[i]))
    )


def read(path: str | None) -> tuple[str, str]:
    """The name of a text and the text: a UTF-8 file, or the built-in one."""
    if path is None:
        return BUILTIN, builtin()
    try:
        return Path(path).name, Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"text {path} cannot be read ({error}); it must be a UTF-8 file: name another") from error


def digest(text: str) -> str:
    """What tells texts apart: 16 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_tokens(tokenizer: Any, text: str, count: int) -> Tensor:
    """Token ids [count] of the beginning of a text, or of all of it."""
    import torch

    ids = tokenizer(text[: 16 * count], add_special_tokens=False)["input_ids"][:count]
    return torch.tensor(ids, dtype=torch.int64)
