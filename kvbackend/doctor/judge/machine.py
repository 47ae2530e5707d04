"""Checks of the host, its Python and the environment."""

from __future__ import annotations

from kvbackend.doctor.facts import View
from kvbackend.doctor.judge.check import Check, Row, blocked, gib, info, listed, ok, plain, unknown


def _arch(view: View) -> Row | None:
    kernel = view["host.kernel"]
    if not view["host.arch"]:
        return None
    return (
        ok("{arch}, kernel {kernel}", arch=view["host.arch"], kernel=kernel)
        if kernel
        else ok("{value}", value=view["host.arch"])
    )


def _user(view: View) -> Row | None:
    return None if view["host.uid"] is None else ok("uid {uid}", uid=view["host.uid"])


def _memory(view: View) -> Row | None:
    memory, limit = view["host.memory"], view["host.cgroup_memory"]
    if not memory:
        return None
    if limit and limit < memory:
        return ok("{memory} memory, limited to {limit} by the control group", memory=gib(memory), limit=gib(limit))
    return (
        ok("{memory} memory, {cpus} CPUs", memory=gib(memory), cpus=view["host.cpus"])
        if view["host.cpus"]
        else ok("{memory} memory", memory=gib(memory))
    )


def _shm(view: View) -> Row | None:
    size = view["host.shm"]
    if size is None:
        return None
    if size < 1 << 30 and view["host.container"]:
        return info(
            "/dev/shm has {size}; engines with several processes want more: start the container with --shm-size",
            size=gib(size),
        )
    return ok("/dev/shm {size}", size=gib(size))


def _probes(view: View) -> Row | None:
    broken = [f"{k[6:]} ({view.error(k)})" for k in view if k.startswith("probe.")]
    return (
        blocked(
            "no answer from {probes}; a verdict needs them: run again with -vv and a larger --timeout",
            probes="; ".join(broken),
        )
        if broken
        else None
    )


def _dists(view: View) -> Row | None:
    dists = view["py.dists"] or {}
    named = [
        f"{n} {dists[n]}" for n in ("vllm", "vllm-ascend", "sglang", "transformers", "flashinfer-python") if n in dists
    ]
    return ok("{value}", value=listed(named)) if named else None


def _consistent(view: View) -> Row | None:
    if not view["env.known"]:
        return unknown("an image has no environment; only its files are judged")
    trees = view["ascend.cann.env_trees"]
    return ok("ASCEND_* variables name one tree") if trees and view["ascend.cann.env_roots"] == 1 else None


def _mask(view: View) -> Row | None:
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if view["env." + name] is not None:
            return ok("{name}={value}", name=name, value=view["env." + name])
    return None


def _preload(view: View) -> Row | None:
    value = view["env.LD_PRELOAD"]
    return info("LD_PRELOAD={value}", value=value) if value else None


CHECKS = (
    Check("host.probes", "Host", "any", _probes, "Every probe came back in time and whole."),
    Check("host.os", "Host", "any", plain("host.os", "{value}"), "The distribution.", facts=("host.os",)),
    Check(
        "host.arch",
        "Host",
        "any",
        _arch,
        "Processor architecture and kernel.",
        facts=("host.arch", "host.kernel"),
    ),
    Check(
        "host.glibc",
        "Host",
        "any",
        plain("host.glibc", "glibc {value}"),
        "The C library must be at least as new as the one our libraries were built with.",
        facts=("host.glibc", "ext.needs_glibc"),
    ),
    Check(
        "host.libstdcxx",
        "Host",
        "any",
        plain("host.libstdcxx", "libstdc++ GLIBCXX_{value}"),
        "The C++ library that the Python process resolves must be as new as our libraries need.",
        facts=("host.libstdcxx", "ext.needs_glibcxx"),
    ),
    Check(
        "host.container",
        "Host",
        "any",
        plain("host.container", "container ({value})"),
        "Whether this is a container, where some files are normally absent.",
        facts=("host.container",),
    ),
    Check(
        "host.user",
        "Host",
        "any",
        _user,
        "User and passwd entry; collectives need an entry.",
        facts=("host.uid", "host.passwd"),
    ),
    Check(
        "host.memory",
        "Host",
        "any",
        _memory,
        "Memory and its limit.",
        facts=("host.memory", "host.cgroup_memory"),
    ),
    Check(
        "host.shm",
        "Host",
        "any",
        _shm,
        "Shared memory for engines with several processes.",
        facts=("host.shm",),
    ),
    Check(
        "py.version",
        "Python",
        "any",
        plain("py.version", "Python {value}", "no Python found in this tree"),
        "The interpreter that is judged.",
        facts=("py.version",),
    ),
    Check(
        "py.dists",
        "Python",
        "any",
        _dists,
        "Packages that matter here, and compiled ones whose libraries are missing.",
        facts=("py.dists", "py.unresolved"),
    ),
    Check(
        "py.duplicates",
        "Python",
        "any",
        lambda view: None,
        "No package is installed twice.",
        facts=("py.duplicates",),
    ),
    Check(
        "py.shadow",
        "Python",
        "any",
        lambda view: None,
        "No folder hides an installed torch.",
        facts=("py.shadow",),
    ),
    Check(
        "py.numpy",
        "Python",
        "any",
        plain("py.numpy", "numpy {value}"),
        "numpy fits the CANN compiler.",
        facts=("py.numpy",),
        ruling="numpy_cann",
    ),
    Check(
        "py.tbe_deps",
        "Python",
        "ascend",
        lambda view: None,
        "Packages that CANN's operator compiler imports.",
        facts=("py.tbe_missing",),
        needs=("ascend.cann.active",),
    ),
    Check(
        "env.cann_consistent",
        "Environment",
        "ascend",
        _consistent,
        "All ASCEND_* variables name one complete tree.",
        facts=("ascend.cann.env_trees", "ascend.cann.opp"),
    ),
    Check(
        "env.mask",
        "Environment",
        "any",
        _mask,
        "Visibility masks are well-formed and in range.",
        facts=("env.ASCEND_RT_VISIBLE_DEVICES", "env.CUDA_VISIBLE_DEVICES"),
    ),
    Check(
        "env.alloc_conf",
        "Environment",
        "ascend",
        lambda view: None,
        "Allocator options fit the chip and the driver.",
        facts=("env.PYTORCH_NPU_ALLOC_CONF",),
    ),
    Check(
        "env.order",
        "Environment",
        "ascend",
        lambda view: None,
        "set_env.sh could do its work.",
        facts=("ascend.driver.path_key",),
    ),
    Check(
        "env.preload",
        "Environment",
        "any",
        _preload,
        "Libraries that are loaded before all others.",
        facts=("env.LD_PRELOAD",),
    ),
)
