"""Messages that remember the sentence they were made from, so that they can be shown in another language."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Text(str):
    """A finished English message that keeps its template and parameters."""

    template: str
    params: dict[str, Any]

    def said_in(self, table: dict[str, str]) -> str:
        """The message in the language of `table` (English template -> template), in English where it has none."""
        params = {name: translated(value, table) for name, value in self.params.items()}
        template = table.get(self.template, self.template)
        return template.format(**params) if params else template


class Joined(Text):
    """Several messages in a row, each translated on its own."""

    def said_in(self, table: dict[str, str]) -> str:
        """The messages in the language of `table`."""
        return self.template.join(translated(part, table) for part in self.params.values())


def say(template: str, **params: Any) -> Text:
    """Fill `template` with `params`; without parameters the template is the message, braces and all."""
    text = Text(template.format(**params) if params else template)
    text.template, text.params = template, params
    return text


def join(parts: Iterable[str], separator: str = ", ") -> Joined:
    """The non-empty `parts` as one message."""
    kept = [part for part in parts if part]
    text = Joined(separator.join(kept))
    text.template, text.params = separator, {str(i): part for i, part in enumerate(kept)}
    return text


def translated(value: Any, table: dict[str, str]) -> Any:
    """`value` through `table`: a `Text` by its template, a plain string as a whole, anything else unchanged."""
    if isinstance(value, Text):
        return value.said_in(table)
    return table.get(value, value) if isinstance(value, str) else value
