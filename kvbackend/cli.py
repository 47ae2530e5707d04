"""The `kvbackend` command: choose a subcommand, parse, call, turn errors into exit codes. No logic.

A command is a module with `add_arguments(parser)` and `main(args) -> int`; only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import ArgumentError, UnsupportedError

# command -> (module, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("kvbackend.commands.run", "let a real language model decode through the paged cache"),
    "eval": ("kvbackend.commands.eval", "what compressing the cache costs a real model on real text"),
    "tune": ("kvbackend.commands.tune", "climb to a smaller cache as long as the model loses little"),
    "doctor": ("kvbackend.doctor.command", "judge this host: versions, drivers, libraries, and how to mend them"),
    "plan": ("kvbackend.commands.plan", "what a KV cache costs and what fits"),
    "ops": ("kvbackend.commands.ops", "list the operations and who implements them"),
    "explain": ("kvbackend.commands.explain", "who would run a call, and why not the others"),
    "matrix": ("kvbackend.commands.matrix", "every op x backend x dtype x sample on this machine"),
    "bench": ("kvbackend.commands.bench", "time of the operations and of dispatch"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done and good, 1 the command's verdict is bad, 2 usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="kvbackend", description="KV-cache operations, one contract on every device.")
    parser.add_argument("--version", action="version", version=f"kvbackend {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        code: int = import_module(COMMANDS[args.command][0]).main(args)
        sys.stdout.flush()
        return code
    except ArgumentError as error:
        print(f"kvbackend {args.command}: {error}", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"kvbackend {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `kvbackend ops | head`: the reader has what it wanted
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to write the rest
        print(f"kvbackend {args.command}: the output cannot be written ({error.strerror}): make room", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
