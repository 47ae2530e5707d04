"""Our own kernels for CPUs, in csrc/cpu; a plain loop for each, and AVX2 and AVX-512 builds chosen at load."""

from collections.abc import Iterator

from ... import direct, native

DEVICE = "cpu"
ORDER = 100
EVIDENCE = "built, not run"
shorter = direct.call


def missing() -> Iterator[str]:
    """Why no CPU kernel can run in this process."""
    if reason := native.library(DEVICE).reason:
        yield reason
