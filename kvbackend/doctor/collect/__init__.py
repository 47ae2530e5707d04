"""Collect facts: many small probes, none of which can harm another.

Static probes run one after the other in a thread that is given up when it hangs (a dead network mount); they start
no program, open no socket and import nothing heavy. Import and device probes run beside each other, each in children
that are killed as a group. A probe that fails leaves the fact `probe.<name>`, which says how.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from kvbackend.doctor import facts, process
from kvbackend.doctor.collect import (
    ascend,
    cuda,
    device,
    environment,
    extension,
    imports,
    machine,
    python,
    tools,
)
from kvbackend.doctor.facts import Facts
from kvbackend.doctor.host import Host

LEVELS = ("static", "import", "device")
_WORKERS = 4
INTERRUPTED = "run.interrupted"
SLOW_S = 3.0  # after which a waiting user is told


class Probe(NamedTuple):
    """A named function that returns facts; beyond the static level it also takes its time limit."""

    name: str
    level: str
    run: Callable[..., Facts]


PROBES = (
    Probe("system", "static", machine.system),
    Probe("libstdcxx", "static", machine.libstdcxx),
    Probe("compiler", "static", machine.compiler),
    Probe("container", "static", machine.container),
    Probe("user", "static", machine.user),
    Probe("resources", "static", machine.resources),
    Probe("pci", "static", machine.pci),
    Probe("environment", "static", environment.variables),
    Probe("ascend.nodes", "static", ascend.nodes),
    Probe("ascend.driver", "static", ascend.driver),
    Probe("ascend.libraries", "static", ascend.libraries),
    Probe("ascend.cann", "static", ascend.cann),
    Probe("ascend.atb", "static", ascend.atb),
    Probe("ascend.compilers", "static", ascend.compilers),
    Probe("cuda.nodes", "static", cuda.nodes),
    Probe("cuda.driver", "static", cuda.driver),
    Probe("cuda.toolkit", "static", cuda.toolkit),
    Probe("cuda.runtime", "static", cuda.runtime),
    Probe("python", "static", python.interpreter),
    Probe("torch", "static", python.torch),
    Probe("companions", "static", python.companions),
    Probe("extension", "static", extension.libraries),
    Probe("npu-smi", "import", tools.npu),
    Probe("nvidia-smi", "import", tools.nvidia),
    Probe("import torch", "import", device.torch_and_ops),
    Probe("import torch as you do", "import", imports.torch_real),
    Probe("import torch_npu", "import", imports.torch_npu),
    Probe("compilers", "import", tools.versions),
    Probe("round trip", "device", device.round_trip),
)


def collect(
    host: Host,
    level: str = "static",
    timeout: float = 10.0,
    deadline: float = 60.0,
    slow: Callable[[str], None] | None = None,
    aclnn: Sequence[str] = ascend.ACLNN,
) -> Facts:
    """Run every probe up to `level`. `slow` is told of a probe that has run for three seconds."""
    end = time.monotonic() + deadline
    found: Facts = {}
    wanted = [p for p in PROBES if LEVELS.index(p.level) <= LEVELS.index(level)]
    try:
        for probe in wanted:
            if probe.level == "static":
                run = (lambda h: ascend.cann(h, aclnn)) if probe.run is ascend.cann else probe.run
                limit = min(timeout, max(0.1, end - time.monotonic()))
                _run([probe._replace(run=run)], (host,), limit, found, None)
        later = [p for p in wanted if p.level != "static"]
        _run(later, (host, timeout), max(0.1, end - time.monotonic()), found, slow)
    except KeyboardInterrupt:
        found[INTERRUPTED] = facts.value(True)
    finally:
        process.kill(host.children)  # what no probe waits for any more
    return json.loads(json.dumps(found))  # live facts and saved ones are the same document


def _run(
    probes: list[Probe], args: tuple[Any, ...], limit: float, found: Facts, slow: Callable[[str], None] | None
) -> None:
    """Run probes in daemon threads, a few at once, and give up on what is not done within `limit` seconds."""
    waiting: queue.Queue[Probe] = queue.Queue()
    done: queue.Queue[tuple[Probe, Facts, float]] = queue.Queue()
    for probe in probes:
        waiting.put(probe)

    def work() -> None:
        while True:
            try:
                probe = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            try:
                result = probe.run(*args)
            except Exception as error:
                result = {
                    "probe." + probe.name: facts.failed("crashed", probe.name, f"{type(error).__name__}: {error}")
                }
            done.put((probe, result, 1000 * (time.monotonic() - start)))

    for _ in range(min(_WORKERS, len(probes))):
        threading.Thread(target=work, daemon=True).start()
    left: dict[str, Probe] = {p.name: p for p in probes}
    begin = time.monotonic()
    told = False
    while left:
        passed = time.monotonic() - begin
        if passed >= limit:
            break
        if slow and not told and passed >= SLOW_S:
            slow(", ".join(sorted(left)))
            told = True
        try:
            probe, result, ms = done.get(timeout=min(0.25, limit - passed))
        except queue.Empty:
            continue
        del left[probe.name]
        for fact in result.values():
            fact.setdefault("ms", round(ms, 1))
        found.update(result)
    for name in left:
        found["probe." + name] = facts.failed("timeout", name, f"no answer within {limit:.0f} s")
