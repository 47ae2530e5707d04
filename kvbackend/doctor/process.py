"""Run a program that may hang, flood, fork, abort or print rubbish, and come back in time with what it said."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import NamedTuple

OUTPUT_LIMIT = 256 * 1024
_GRACE_S = 0.3  # for output that is still in the pipe when the program has ended


class Output(NamedTuple):
    """What a program did. `ended` is exit, signal, timeout, flood or missing; `answer` came by a pipe of its own."""

    ended: str
    code: int = 0
    stdout: str = ""
    stderr: str = ""
    answer: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Output and errors, one after the other."""
        return self.stdout + ("\n" if self.stdout and self.stderr else "") + self.stderr


def run(
    argv: list[str],
    timeout: float,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    limit: int = OUTPUT_LIMIT,
    live: set[subprocess.Popen[bytes]] | None = None,
) -> Output:
    """Run `argv` in a process group of its own and kill the whole group at the end, whatever happened.

    An argument `{answer}` becomes the number of a pipe on which the program may answer apart from its output. While it
    runs, the program is in `live`, so that `kill` can end what a caller no longer waits for.
    """
    start = time.monotonic()
    answer_read, answer_write = os.pipe()
    argv = [a.replace("{answer}", str(answer_write)) for a in argv]
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,
            pass_fds=(answer_write,),
        )
    except (OSError, ValueError) as error:
        os.close(answer_read)
        os.close(answer_write)
        return Output("missing", 127, "", str(error))
    os.close(answer_write)
    live = set() if live is None else live
    live.add(child)
    assert child.stdout is not None
    assert child.stderr is not None
    pipes = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray(), answer_read: bytearray()}
    try:
        ended = _watch(child, pipes, start + timeout, limit)
    finally:
        _kill_group(child)
        live.discard(child)
        out, err, answer = pipes.values()
        child.stdout.close()
        child.stderr.close()
        os.close(answer_read)
    code = child.returncode
    if ended == "exit" and code < 0:
        ended = "signal"
    stdout, stderr, told = (bytes(data[:limit]).decode("utf-8", "replace") for data in (out, err, answer))
    return Output(ended, code, stdout, stderr, told, time.monotonic() - start)


def _watch(child: subprocess.Popen[bytes], pipes: dict[int, bytearray], deadline: float, limit: int) -> str:
    """Collect output until the program ends, time is up or it has said too much."""
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        closing = None
        while True:
            now = time.monotonic()
            if closing is None and child.poll() is not None:
                closing = min(now + _GRACE_S, deadline)
            if now >= (deadline if closing is None else closing) or (closing is not None and not selector.get_map()):
                return "timeout" if closing is None else "exit"
            if not selector.get_map():
                time.sleep(0.01)
                continue
            for key, _ in selector.select(0.02 if closing is None else max(0.0, closing - now)):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                elif len(pipes[key.fd]) < limit:
                    pipes[key.fd] += chunk
                else:
                    return "flood"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # everything in the group has ended already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def kill(live: set[subprocess.Popen[bytes]]) -> None:
    """End every program that still runs, with its group."""
    for child in list(live):
        _kill_group(child)
