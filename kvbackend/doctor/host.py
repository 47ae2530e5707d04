"""The host as the probes see it: a root folder, an environment and a way to run programs.

The root is `/` or a mounted image; links inside an image resolve inside it. Nothing is written, ever.
"""

from __future__ import annotations

import builtins
import errno
import functools
import mmap
import os
import stat
from typing import Any, Callable, NamedTuple

from kvbackend.doctor import process

TEXT_LIMIT = 64 * 1024


class Reading(NamedTuple):
    """What reading a file gave: state is value, absent or unreadable."""

    state: str
    data: bytes = b""
    error: str = ""

    @property
    def text(self) -> str:
        """The bytes as text, whatever they are."""
        return self.data.decode("utf-8", "replace")


class Host:
    """A machine, or a tree that looks like one."""

    def __init__(
        self,
        root: str = "/",
        environ: dict[str, str] | None = None,
        run: Callable[..., process.Output] = process.run,
    ) -> None:
        self.root = os.path.abspath(root)
        self.live = self.root == "/"
        self.files_read: list[str] = []
        self.children: set[Any] = set()
        self.run = functools.partial(run, live=self.children) if run is process.run else run
        self._memo: dict[Any, Any] = {}
        self.environ_known = True
        if environ is not None:
            self.environ = dict(environ)
        elif self.live:
            self.environ = dict(os.environ)
        else:
            self.environ = self._environ_of_tree()

    def _environ_of_tree(self) -> dict[str, str]:
        reading = self.read("/proc/self/environ")
        if reading.state != "value":
            self.environ_known = False
            return {}
        pairs = (p.partition("=") for p in reading.text.split("\0") if "=" in p)
        return {name: text for name, _, text in pairs}

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """Compute once per host; two probes that race compute the same value twice, which harms nobody."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def real(self, path: str) -> str:
        """The path without links, as seen from inside the root."""
        if self.live:
            return os.path.realpath(path)
        parts, done, hops = [p for p in path.split("/") if p not in ("", ".")], "", 0
        while parts:
            part = parts.pop(0)
            if part == "..":
                done = os.path.dirname(done).rstrip("/")
                continue
            try:
                target = os.readlink(self.root + done + "/" + part)
            except OSError:
                done += "/" + part
                continue
            hops += 1
            if hops > 40:
                return path
            if target.startswith("/"):
                done = ""
            parts = [p for p in target.split("/") if p not in ("", ".")] + parts
        return done or "/"

    def outside(self, path: str) -> str:
        """Where the path lies on the real file system."""
        return path if self.live else self.root + self.real(path)

    def read(self, path: str, limit: int = TEXT_LIMIT) -> Reading:
        """Read at most `limit` bytes of a regular file."""
        handle = -1
        try:
            handle = os.open(self.outside(path), os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return Reading("unreadable", error="not a regular file")
            chunks, left = [], limit
            while left > 0:
                chunk = os.read(handle, left)
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
            return Reading("absent" if missing else "unreadable", error=os.strerror(error.errno or 0))
        except ValueError:
            return Reading("absent", error="not a path")
        finally:
            if handle >= 0:
                os.close(handle)
        self.files_read.append(path)
        return Reading("value", b"".join(chunks))

    def map(self, path: str) -> bytes | mmap.mmap:
        """A regular file as mapped memory, of which only what is looked at gets read; empty when there is none."""
        try:
            handle = os.open(self.outside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return b""
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return b""
            self.files_read.append(path)
            return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # an empty file cannot be mapped
            return b""
        finally:
            os.close(handle)

    def text(self, path: str) -> str:
        """The text of a small file, '' when there is none."""
        return self.read(path).text

    def list(self, path: str) -> builtins.list[str]:
        """Names in a folder, sorted; empty when it cannot be listed."""
        try:
            return sorted(os.listdir(self.outside(path)))
        except (OSError, ValueError):
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there, links followed inside the root."""
        try:
            return os.path.exists(self.outside(path))
        except ValueError:
            return False

    def is_dir(self, path: str) -> bool:
        """Whether a folder is there."""
        try:
            return os.path.isdir(self.outside(path))
        except ValueError:
            return False

    def which(self, program: str) -> str:
        """The first executable of that name on PATH, or ''."""
        default = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        for folder in self.environ.get("PATH", default).split(":"):
            path = os.path.join(folder, program)
            if (
                folder.startswith("/")
                and self.exists(path)
                and os.access(self.outside(path), os.X_OK)
                and not self.is_dir(path)
            ):
                return path
        return ""

    def paths(self, name: str) -> builtins.list[str]:
        """The absolute folders of a colon-separated variable."""
        return [p for p in self.environ.get(name, "").split(":") if p.startswith("/")]

    def try_open(self, path: str) -> str:
        """'' when the node opens for reading and writing, else the error's name such as EACCES."""
        if not self.live:
            reading = os.access(self.outside(path), os.R_OK | os.W_OK)
            return "" if reading else "EACCES"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "EIO")
        return ""
