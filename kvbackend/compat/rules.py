"""The compatibility rules: each asks the matrix one question and answers with a `Ruling`.

Every function takes version texts as the host shows them and an optional `matrix` (the shipped one by default). What
the rows do not say is `unknown`, never `bad`. Sources stand in the rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from kvbackend.compat import versions
from kvbackend.compat.data import Matrix, load_matrix
from kvbackend.compat.text import say


class Ruling(NamedTuple):
    """An answer: `state` is ok, bad or unknown; `reason` is empty when ok; `row` and `source` name what decided."""

    state: str
    reason: str = ""
    row: str = ""
    source: str = ""
    found: str = ""
    expected: str = ""

    def __str__(self) -> str:
        return self.reason or self.state


@functools.lru_cache(maxsize=1)
def shipped() -> Matrix:
    """The matrix of the package, read once."""
    return load_matrix()


def _row(row: dict[str, Any], *names: str) -> dict[str, str]:
    return {"row": "{} {}".format(row["kind"], " ".join(str(row[n]) for n in names)), "source": row["source"]}


def _unknown(pair: str, expected: str) -> Ruling:
    return Ruling(
        "unknown",
        say(
            "{pair} is not in the matrix; the nearest known good set is {set}: use it, or go on "
            "knowing that nobody vouches for this pair",
            pair=pair,
            set=expected,
        ),
        found=pair,
        expected=expected,
    )


def _cann_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def torch_npu_torch(torch: str, torch_npu: str) -> Ruling:
    """torch_npu X.Y.Z[.postN] is compiled for torch X.Y.Z and for no other patch release."""
    source = "torch-npu wheel metadata (Requires-Dist)"
    want, have = versions.base(torch_npu), versions.base(torch)
    if not want or not have:
        return Ruling(
            "unknown",
            say(
                "torch {torch} with torch_npu {npu} cannot be compared; both need a version X.Y.Z: "
                "reinstall the one that has none",
                torch=torch,
                npu=torch_npu,
            ),
            source=source,
        )
    if want == have:
        return Ruling("ok", row="torch-exact", source=source)
    return Ruling(
        "bad",
        say(
            "torch {torch} with torch_npu {npu}; torch_npu {npu} is built for torch {want} alone: "
            "install torch=={want}",
            torch=torch,
            npu=torch_npu,
            want=want,
        ),
        "torch-exact",
        source,
        torch,
        want,
    )


def product_of(torch_npu: str, matrix: Matrix | None = None) -> str:
    """The TorchNPU product release of a torch_npu version, '' when the table does not say."""
    row = (matrix or shipped()).row("torch_npu", versions_key(torch_npu))
    return (row or {}).get("product") or ""


def versions_key(text: str) -> str:
    """A version as the matrix writes it: without the local part."""
    return text.strip().split("+")[0]


def torch_npu_cann(torch_npu: str, cann: str, matrix: Matrix | None = None) -> Ruling:
    """The pair of the vendor's table, else the product's stated CANN lines."""
    matrix = matrix or shipped()
    row = matrix.row("torch_npu", versions_key(torch_npu))
    if row and any(versions.fits(p, cann) for p in _cann_list(row["cann"]) + row.get("cann_seen", [])):
        return Ruling("ok", **_row(row, "torch_npu"))
    product = row["product"] if row else None
    for line in matrix.rows("product_cann") if product else ():
        if versions.fits(line["product"], product) and versions.fits(line["cann"], cann):
            return Ruling("ok", **_row(line, "product", "cann"))
    pair = f"torch_npu {torch_npu} with CANN {cann}"
    return _unknown(pair, nearest_set(torch_npu, cann, matrix))


def nearest_set(torch_npu: str, cann: str, matrix: Matrix | None = None) -> str:
    """A published torch_npu and CANN pair: same CANN and torch first, then same CANN, then same torch."""
    rows = [r for r in (matrix or shipped()).rows("torch_npu") if r["cann"]]
    torch = versions.base(torch_npu)

    def distance(row: dict[str, Any]) -> tuple[bool, ...]:
        releases = _cann_list(row["cann"])
        same_cann, same_torch = any(versions.fits(p, cann) for p in releases), row["torch"] == torch
        return not (same_cann and same_torch), not same_cann, not same_torch, cann not in releases

    if not rows:
        return "none known"
    best = min(rows, key=distance)
    return "torch {}, torch_npu {}, CANN {}".format(best["torch"], best["torch_npu"], _cann_list(best["cann"])[0])


def cann_driver(cann: str, driver: str, matrix: Matrix | None = None) -> Ruling:
    """CANN against the driver line (HDK) of the vendor's matrix."""
    known = []
    for row in (matrix or shipped()).rows("cann_driver"):
        if not versions.fits(row["cann"], cann):
            continue
        if row["ok"]:
            known.append(row["driver"])
        if versions.fits(row["driver"], driver):
            if row["ok"]:
                return Ruling("ok", **_row(row, "cann", "driver"))
            good = ", ".join(
                r["driver"]
                for r in (matrix or shipped()).rows("cann_driver")
                if r["ok"] and versions.fits(r["cann"], cann)
            )
            return Ruling(
                "bad",
                say(
                    "driver {driver} with CANN {cann}; the vendor pairs this CANN with {good}: upgrade "
                    "driver and firmware on the host",
                    driver=driver,
                    cann=cann,
                    good=good,
                ),
                found=driver,
                expected=good,
                **_row(row, "cann", "driver"),
            )
    return _unknown(f"driver {driver} with CANN {cann}", "driver " + (", ".join(known) or "none known"))


def soc_row(soc: str, matrix: Matrix | None = None) -> dict[str, Any] | None:
    """The row of a chip, matched by the longest prefix of its name (`Ascend950PR_9579` -> `Ascend950PR`)."""
    rows = [r for r in (matrix or shipped()).rows("soc") if soc.lower().startswith(r["soc"].lower())]
    return max(rows, key=lambda r: len(r["soc"])) if rows else None


def soc_cann(soc: str, cann: str, matrix: Matrix | None = None) -> Ruling:
    """Whether this CANN release already knows the chip."""
    return _introduced(soc, "CANN", cann, "cann_min", matrix)


def soc_torch_npu(soc: str, torch_npu: str, matrix: Matrix | None = None) -> Ruling:
    """Whether the TorchNPU product of this torch_npu already knows the chip."""
    product = product_of(torch_npu, matrix)
    if not product:
        return Ruling("unknown")
    return _introduced(soc, "TorchNPU", product, "product_min", matrix)


def _introduced(soc: str, what: str, have: str, key: str, matrix: Matrix | None) -> Ruling:
    row, version = soc_row(soc, matrix), versions.parse(have)
    if row is None or not row[key] or version is None:
        return Ruling("unknown")
    if _at_least(version, row[key]):
        return Ruling("ok", **_row(row, "soc"))
    return Ruling(
        "bad",
        say(
            "{what} {have} on {soc}; this chip needs {what} {min} or newer: upgrade {what}",
            what=what,
            have=have,
            soc=soc,
            min=row[key],
        ),
        found=have,
        expected=">= " + row[key],
        **_row(row, "soc"),
    )


def _at_least(version: versions.Version, minimum: str) -> bool:
    """Whether `version` reaches `minimum`; a beta of the minimum itself counts, as the vendor ships features in it."""
    wanted = versions.parse(minimum)
    return wanted is not None and (version >= wanted or (version.release == wanted.release and len(wanted.tail) == 1))


def op_cann(op: str, soc: str, cann: str, matrix: Matrix | None = None) -> Ruling:
    """Whether a vendor op runs on this chip with this CANN; that the Python symbol exists proves nothing.

    `op` is the vendor's name (`npu_sparse_flash_attention`, `flash_mla`); `unknown` when no row speaks of op and chip.
    """
    rows = [r for r in (matrix or shipped()).rows("op") if r["op"] == op and soc.lower().startswith(r["soc"].lower())]
    version = versions.parse(cann)
    if not rows or version is None:
        return Ruling("unknown")
    row = max(rows, key=lambda r: len(r["soc"]))
    where = _row(row, "op", "soc")
    if row["cann_min"] is None:
        return Ruling(
            "bad",
            say(
                "{op} on {soc}; the vendor has no kernel of this op for the chip: use another backend",
                op=op,
                soc=soc,
            ),
            found=soc,
            expected="another chip",
            **where,
        )
    if _at_least(version, row["cann_min"]):
        return Ruling("ok", **where)
    return Ruling(
        "bad",
        say(
            "{op} on {soc} with CANN {cann}; it needs CANN {min} or newer: upgrade CANN",
            op=op,
            soc=soc,
            cann=cann,
            min=row["cann_min"],
        ),
        found=cann,
        expected=">= " + row["cann_min"],
        **where,
    )


def feature(name: str, cann: str = "", driver: str = "", matrix: Matrix | None = None) -> Ruling:
    """Whether a feature's minimum CANN and driver are met; a version that is not given is not compared."""
    row = (matrix or shipped()).row("feature", name)
    if row is None:
        return Ruling("unknown")
    for what, have, least in (("CANN", cann, row["cann_min"]), ("driver", driver, row["driver_min"])):
        version = versions.parse(have)
        if least and version is not None and not _at_least(version, least):
            return Ruling(
                "bad",
                say(
                    "{what} {have} for {feature}; it needs {what} {min} or newer: upgrade {what}",
                    what=what,
                    have=have,
                    feature=name,
                    min=least,
                ),
                found=have,
                expected=">= " + least,
                **_row(row, "feature"),
            )
    return Ruling("ok", **_row(row, "feature"))


def python_torch(python: str, torch: str, matrix: Matrix | None = None) -> Ruling:
    """Whether wheels of this torch line exist for this Python minor release."""
    row = (matrix or shipped()).row("python_torch", versions.base(torch))
    minor = ".".join(python.split(".")[:2])
    if row is None:
        return Ruling("unknown")
    if minor in row["python"]:
        return Ruling("ok", **_row(row, "torch"))
    allowed = ", ".join(row["python"])
    return Ruling(
        "bad",
        say(
            "Python {python} with torch {torch}; this torch is published for Python {allowed}: use one of these",
            python=minor,
            torch=torch,
            allowed=allowed,
        ),
        found=minor,
        expected=allowed,
        **_row(row, "torch"),
    )


def triton_ascend_cann(triton_ascend: str, cann: str, matrix: Matrix | None = None) -> Ruling:
    """triton-ascend is made for the compiler of one CANN release."""
    matrix = matrix or shipped()
    row = matrix.row("triton_ascend", versions_key(triton_ascend))
    if row and any(versions.fits(p, cann) for p in _cann_list(row["cann"])):
        return Ruling("ok", **_row(row, "triton_ascend"))
    good = [r["triton_ascend"] for r in matrix.rows("triton_ascend") if any(versions.fits(p, cann) for p in r["cann"])]
    if good and row:
        return Ruling(
            "bad",
            say(
                "triton-ascend {have} with CANN {cann}; this CANN goes with triton-ascend {good}: install it",
                have=triton_ascend,
                cann=cann,
                good=good[-1],
            ),
            found=triton_ascend,
            expected=good[-1],
            **_row(row, "triton_ascend"),
        )
    return _unknown(
        f"triton-ascend {triton_ascend} with CANN {cann}",
        "triton-ascend " + (good[-1] if good else "none known"),
    )


def triton_ascend_for(cann: str, matrix: Matrix | None = None) -> str:
    """The triton-ascend release for a CANN release, '' when none is known."""
    rows = (matrix or shipped()).rows("triton_ascend")
    good = [r["triton_ascend"] for r in rows if any(versions.fits(p, cann) for p in r["cann"])]
    return good[-1] if good else ""


def vllm_ascend(version: str, have: dict[str, str], matrix: Matrix | None = None) -> Ruling:
    """vllm-ascend pins its whole stack; `have` maps cann, torch, torch_npu, triton_ascend to what is installed."""
    row = (matrix or shipped()).row("vllm_ascend", versions_key(version).lstrip("v"))
    if row is None:
        return Ruling("unknown")
    wrong = [
        k
        for k in ("cann", "torch", "torch_npu", "triton_ascend")
        if row[k] and have.get(k) and not versions.fits(versions_key(row[k]), have[k])
    ]
    if not wrong:
        return Ruling("ok", **_row(row, "vllm_ascend"))
    found = ", ".join(f"{k} {have[k]}" for k in wrong)
    expected = ", ".join(f"{k} {row[k]}" for k in wrong)
    return Ruling(
        "bad",
        say(
            "vllm-ascend {version} with {found}; it pins {expected}: install these",
            version=version,
            found=found,
            expected=expected,
        ),
        found=found,
        expected=expected,
        **_row(row, "vllm_ascend"),
    )


def numpy_cann(numpy: str, cann: str, matrix: Matrix | None = None) -> Ruling:
    """Older CANN compilers need numpy 1."""
    for row in (matrix or shipped()).rows("numpy_cann"):
        if versions.within(numpy, row["numpy"]) and versions.within(cann, row["cann"]):
            return Ruling(
                "bad",
                say(
                    "numpy {numpy} with CANN {cann}; its operator compiler needs numpy below 2: install 'numpy<2'",
                    numpy=numpy,
                    cann=cann,
                ),
                found=numpy,
                expected="< 2",
                **_row(row, "numpy", "cann"),
            )
    return Ruling("ok")


def cuda_driver(cuda: str, driver: str, matrix: Matrix | None = None) -> Ruling:
    """The driver floor of a CUDA major release."""
    row = (matrix or shipped()).row("cuda_driver", cuda.split(".")[0])
    version = versions.parse(driver)
    if row is None or version is None:
        return Ruling("unknown")
    if _at_least(version, row["driver_min"]):
        return Ruling("ok", **_row(row, "cuda"))
    return Ruling(
        "bad",
        say(
            "driver {driver} with CUDA {cuda}; it needs driver {min} or newer: upgrade the driver, or "
            "install torch for an older CUDA",
            driver=driver,
            cuda=cuda,
            min=row["driver_min"],
        ),
        found=driver,
        expected=">= " + row["driver_min"],
        **_row(row, "cuda"),
    )


def torch_triton(torch: str, triton: str, matrix: Matrix | None = None) -> Ruling:
    """The triton release that the default CUDA wheel of torch pins."""
    row = (matrix or shipped()).row("torch_cuda", versions.base(torch))
    if row is None or not row["triton"] or versions.parse(triton) is None:
        return Ruling("unknown")
    pin = row["triton"].lstrip("~=")
    same = (
        versions.within(triton, ".".join(pin.split(".")[:2]))
        if row["triton"].startswith("~=")
        else versions.fits(pin, triton)
    )
    if same:
        return Ruling("ok", **_row(row, "torch"))
    return Ruling(
        "bad",
        say(
            "triton {triton} with torch {torch}; this torch pins triton {pin}: install it",
            triton=triton,
            torch=torch,
            pin=row["triton"],
        ),
        found=triton,
        expected=row["triton"],
        **_row(row, "torch"),
    )


def cuda_arch(arch: str, toolkit: str, matrix: Matrix | None = None) -> Ruling:
    """Whether a toolkit's assembler knows an architecture; `arch` is sm_XY."""
    row = (matrix or shipped()).row("cuda_arch", arch.rstrip("a"))
    version = versions.parse(toolkit)
    if row is None or version is None:
        return Ruling("unknown")
    if _at_least(version, row["cuda_min"]):
        return Ruling("ok", **_row(row, "arch"))
    return Ruling(
        "bad",
        say(
            "CUDA {toolkit} for {arch}; this architecture needs CUDA {min} or newer: use a newer toolkit",
            toolkit=toolkit,
            arch=arch,
            min=row["cuda_min"],
        ),
        found=toolkit,
        expected=">= " + row["cuda_min"],
        **_row(row, "arch"),
    )


def driver_firmware(driver: str, firmware: str, matrix: Matrix | None = None) -> Ruling:
    """Pairs of driver and firmware seen on working hosts; the ranges inside the install go first."""
    rows = [r for r in (matrix or shipped()).rows("driver_firmware") if versions.fits(r["driver"], driver)]
    if any(versions.fits(r["firmware"], firmware) for r in rows):
        return Ruling("ok", **_row(rows[0], "driver", "firmware"))
    return Ruling("unknown", found=firmware, expected=rows[0]["firmware"] if rows else "")
