"""The command: `kvbackend doctor` and `python -m kvbackend.doctor`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Callable

from kvbackend.compat.data import DataError, load_diagnoses, load_matrix
from kvbackend.doctor import report as reports
from kvbackend.doctor import saved
from kvbackend.doctor.collect import LEVELS
from kvbackend.doctor.collect.ascend import ACLNN
from kvbackend.doctor.judge import BACKENDS, CHECKS, PURPOSES
from kvbackend.doctor.judge.derive import derive
from kvbackend.doctor.judge.symptoms import LOG_LIMIT, explain
from kvbackend.doctor.render import documents, explanation, paint
from kvbackend.doctor.render.screen import screen
from kvbackend.doctor.render.words import Words

EXIT_USAGE = 2
_EPILOG = """exit codes: 0 no failure · 1 a failure · 2 usage, unreadable file · 3 only warnings, with --strict ·
4 no verdict: a needed check gave no answer · 5 the doctor itself failed · 130 interrupted.
--explain -: 0 matched, 1 nothing matched"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help="id or glob of checks, e.g. 'ascend.driver.*'; none: all"
    )
    look = parser.add_argument_group("what to look at")
    look.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="default auto: by PCI ids, device nodes, packages"
    )
    look.add_argument("--for", dest="purpose", choices=PURPOSES, default="run", help="what must work (default run)")
    look.add_argument("--keep-going", action="store_true", help="judge dependents of a failed check too")
    look.add_argument(
        "--level",
        choices=LEVELS,
        default="import",
        help="static: files alone; import (default): also imports, in children; device: also a round trip per card",
    )
    look.add_argument("--root", metavar="DIR", default="/", help="a mounted image, or a bundle; files alone are judged")
    look.add_argument("--matrix", metavar="FILE", help="JSON with further compatibility rows; later rows override")
    look.add_argument("--only", metavar="GLOB", action="append", default=[], help="show these checks only; repeatable")
    look.add_argument("--skip", metavar="GLOB", action="append", default=[], help="leave these checks out; repeatable")
    look.add_argument("--list-checks", action="store_true", help="id, section, level and cost of every check")
    tell = parser.add_argument_group("how to say it")
    tell.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the whole report as JSON")
    tell.add_argument("--report", nargs="?", const="-", metavar="FILE", help="markdown to paste, with a JSON digest")
    tell.add_argument(
        "--bundle", metavar="FILE.tar.gz", help="report, JSON and raw outputs in one file; nothing is sent"
    )
    tell.add_argument("--script", action="store_true", help="the remedies as a commented shell script")
    tell.add_argument("--baseline", metavar="FILE", help="compare with an earlier --json file: changed facts first")
    amount = tell.add_mutually_exclusive_group()
    amount.add_argument("-q", "--quiet", action="store_true", help="problems only")
    amount.add_argument(
        "-v", "--verbose", action="count", default=0, help="every check; twice: evidence, timing, files read"
    )
    tell.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    tell.add_argument("--ascii", action="store_true", help="no other characters")
    tell.add_argument("--lang", choices=("en", "zh"), default="en")
    tell.add_argument(
        "--no-redact", action="store_true", help="keep user and host names, serials, addresses, home paths"
    )
    tell.add_argument("--explain", metavar="ID", help="text on a check or failure kind; '-': match a log on stdin")
    strict = parser.add_argument_group("how strict")
    strict.add_argument("--strict", action="store_true", help="warnings count")
    strict.add_argument("--ci", action="store_true", help="--color never --ascii --strict -q, one line per finding")
    strict.add_argument(
        "--timeout", type=_seconds, metavar="S", help="per probe, imports three times that (10; device 60)"
    )
    strict.add_argument("--deadline", type=_seconds, metavar="S", help="of the whole run (60; device 300)")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; it must be above 0: give one such as 10")
    return number


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    try:
        return _main(args)
    except DataError as error:
        paint.write(f"kvbackend doctor: {error}\n", sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        paint.write("interrupted\n", sys.stderr)
        return reports.EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        paint.write(
            f"kvbackend doctor itself failed: {type(error).__name__}: {error}; run it again with -vv "
            "and report this bug\n",
            sys.stderr,
        )
        if args.verbose > 1:
            raise
        return reports.EXIT_BUG


def _main(args: argparse.Namespace) -> int:
    words = Words(args.lang, args.ascii or args.ci or not paint.fits_unicode(sys.stdout))
    matrix, diagnoses = load_matrix(args.matrix), load_diagnoses()
    baseline = saved.load_report(args.baseline) if args.baseline else None
    if args.list_checks and args.json is not None:
        raise DataError("--list-checks and --json are given; the list is text only: drop one of the two")
    if args.list_checks:
        return _print(explanation.list_checks(words))
    if args.explain and args.explain != "-":
        lines = explanation.explain_id(args.explain, diagnoses, words)
        if lines is None:
            raise DataError(
                "--explain {} is no check and no failure kind; near are {}: see --list-checks".format(
                    args.explain, ", ".join(explanation.near(args.explain, diagnoses))
                )
            )
        return _print(lines)
    _check_globs(args.checks + args.only + args.skip)
    log = sys.stdin.buffer.read(LOG_LIMIT).decode("utf-8", "replace") if args.explain else ""
    report = reports.run(
        "static" if args.explain else args.level,
        backend=args.backend,
        purpose=args.purpose,
        root=args.root,
        keep_going=args.keep_going,
        only=args.checks + args.only,
        skip=args.skip,
        strict=args.strict or args.ci,
        matrix=matrix,
        timeout=args.timeout,
        deadline=args.deadline,
        redact=not args.no_redact,
        slow=_slow(sys.stderr.isatty()),
        argv=sys.argv[1:],
        aclnn=_aclnn(log) if args.explain else ACLNN,
    )
    if args.explain:
        view = derive(report.facts, matrix, args.purpose, args.backend)
        found = explain(log, view, diagnoses)
        _print(explanation.explain_log(found, view, words))
        return 0 if found else 1
    if baseline is not None:
        report.run["baseline"] = saved.changes(baseline, report.document)
    return _tell(report, args, words)


def _aclnn(log: str) -> list[str]:
    import re

    return sorted(set(re.findall(r"(aclnn\w{1,80}?)GetWorkspaceSize", log)))


def _check_globs(globs: list[str]) -> None:
    from fnmatch import fnmatchcase

    for glob in globs:
        if not any(fnmatchcase(c.id, glob) for c in CHECKS):
            raise DataError(f"no check is called {glob}; ids and globs of checks are allowed: see --list-checks")


def _slow(on_terminal: bool) -> Any:
    if not on_terminal:
        return None
    return lambda names: paint.write(f"still waiting for: {names}\n", sys.stderr)


def _tell(report: reports.Report, args: argparse.Namespace, words: Words) -> int:
    """Say the report in every form that was asked for; the screen only when stdout is free."""
    taken = False
    if args.bundle:
        _write(
            args.bundle,
            lambda: saved.write_bundle(args.bundle, report.document, documents.markdown(report, words)),
        )
        paint.write(f"wrote {args.bundle}; look through it before you pass it on\n", sys.stderr)
    forms: tuple[tuple[str | None, Callable[[], str]], ...] = (
        (args.json, lambda: json.dumps(report.document, indent=1, ensure_ascii=args.ascii) + "\n"),
        (args.report, lambda: documents.markdown(report, words)),
        ("-" if args.script else None, lambda: documents.script(report, words)),
    )
    for target, make in forms:
        if target == "-" and not taken:
            paint.write(make(), sys.stdout)
            taken = True
        elif target and target != "-":
            _write(target, lambda: _save(target, make()))
        elif target:
            raise DataError("two outputs would share stdout; one can: give the other a file")
    if not taken and args.ci:
        _print(documents.ci(report, words))
    elif not taken:
        lines = screen(report, words, paint.width(sys.stdout), args.verbose, args.quiet)
        paint.paint(lines, paint.use_color(args.color, sys.stdout), sys.stdout)
    return report.exit_code


def _save(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _write(path: str, act: Any) -> None:
    try:
        act()
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}); a writable path is needed: choose another"
        ) from None


def _print(lines: list[str]) -> int:
    paint.write("\n".join(lines) + "\n", sys.stdout)
    return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line of `python -m kvbackend.doctor`."""
    parser = argparse.ArgumentParser(prog="kvbackend doctor", description="Judge this host and say how to mend it.")
    add_arguments(parser)
    return parser.parse_args(argv)
