"""`kvbackend ops`: the registered operations, what each does, and which backends have a kernel for it."""

from __future__ import annotations

import argparse

from ._output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """List the ops."""
    from ..backends import REFERENCE, registered
    from ..ops import registry

    found = []
    for op in sorted(registry.values(), key=lambda op: (op.group, op.name)):
        kernels = [backend.name for backend in registered().values() if backend.adapter(op.name)]
        found.append(dict(name=op.name, group=op.group, summary=op.summary, backends=[*kernels, REFERENCE]))
    if args.json:
        print_json("ops", {"ops": found})
    else:
        rows = [(op["group"], op["name"], op["summary"], ", ".join(op["backends"])) for op in found]
        print_table(("group", "op", "what it does", "backends"), rows)
    return 0
