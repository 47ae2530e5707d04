"""Load and check the shipped facts: `matrix.json` and `diagnoses.json`."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

MATRIX_SCHEMA, DIAGNOSES_SCHEMA = "kvbackend-matrix/1", "kvbackend-diagnoses/1"

# kind of a matrix row -> the keys that name the row, then those it must also have
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch_npu": (("torch_npu",), ("torch", "product", "cann")),
    "product_cann": (("product", "cann"), ("ok",)),
    "cann_driver": (("cann", "driver"), ("ok",)),
    "driver_firmware": (("driver", "firmware"), ()),
    "soc": (("soc",), ("family", "cann_min", "product_min")),
    "op": (("op", "soc"), ("cann_min",)),
    "feature": (("feature",), ("cann_min", "driver_min")),
    "python_torch": (("torch",), ("python",)),
    "triton_ascend": (("triton_ascend",), ("cann",)),
    "vllm_ascend": (("vllm_ascend",), ("cann", "torch", "torch_npu", "triton_ascend")),
    "numpy_cann": (("numpy", "cann"), ("ok",)),
    "torch_cuda": (("torch",), ("cuda", "triton")),
    "cuda_driver": (("cuda",), ("driver_min",)),
    "cuda_arch": (("arch",), ("cuda_min",)),
}
STATUSES = ("tested", "published")


class DataError(ValueError):
    """A matrix or diagnoses file that cannot be used; the message says what, what is allowed and what to do."""


class Matrix:
    """Rows by kind, in file order; a later row with the same name replaces an earlier one."""

    def __init__(self, rows: list[dict[str, Any]], version: str) -> None:
        self.version = version
        self._kinds: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {kind: {} for kind in KINDS}
        for row in rows:
            names = tuple(str(row[k]) for k in KINDS[row["kind"]][0])
            self._kinds[row["kind"]][names] = row

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """All rows of a kind, in order."""
        return list(self._kinds[kind].values())

    def row(self, kind: str, *names: str) -> dict[str, Any] | None:
        """The row of that name, or None."""
        return self._kinds[kind].get(names)


def check_row(row: Any, where: str) -> None:
    """Raise `DataError` unless `row` is a well-formed matrix row with a source."""
    if not isinstance(row, dict) or row.get("kind") not in KINDS:
        got = row.get("kind") if isinstance(row, dict) else type(row).__name__
        raise DataError("{} is of kind {!r}; a row has one of {}: fix the row".format(where, got, ", ".join(KINDS)))
    names, more = KINDS[row["kind"]]
    missing = [k for k in names + more + ("source", "date", "status") if k not in row]
    missing += [k for k in (*names, "source", "date") if k not in missing and not row[k]]
    if missing:
        raise DataError(
            "{} ({}) lacks {}; every row names these: add them".format(where, row["kind"], ", ".join(missing))
        )
    if row["status"] not in STATUSES:
        raise DataError("{} has status {!r}; allowed are tested and published: fix it".format(where, row["status"]))


def _decode(text: str, where: str, schema: str, key: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); a document of schema {schema} is: fix the file") from None
    if not isinstance(document, dict) or document.get("schema") != schema or not isinstance(document.get(key), list):
        raise DataError(f'{where} has no "schema": "{schema}" with a list "{key}"; both are needed: fix the file')
    return document


def _shipped(name: str) -> str:
    text = pkgutil.get_data(__name__, name)
    assert text is not None, name
    return text.decode("utf-8")


def load_matrix(extra: str | None = None) -> Matrix:
    """The shipped matrix, with the rows of the JSON file `extra` laid over it."""
    document = _decode(_shipped("matrix.json"), "matrix.json", MATRIX_SCHEMA, "rows")
    rows, version = document["rows"], document["version"]
    if extra is not None:
        try:
            with open(extra, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{extra} cannot be read ({error}); --matrix takes a JSON file: check the path") from None
        added = _decode(text, extra, MATRIX_SCHEMA, "rows")["rows"]
        for number, row in enumerate(added, 1):
            check_row(row, f"row {number} of {extra}")
        rows, version = rows + added, version + "+local"
    return Matrix(rows, version)


def load_diagnoses() -> dict[str, Any]:
    """The shipped failure kinds: a document with `version` and `diagnoses`, a list of rows."""
    return _decode(_shipped("diagnoses.json"), "diagnoses.json", DIAGNOSES_SCHEMA, "diagnoses")


def load_translations() -> dict[str, str]:
    """English sentence -> Chinese sentence, for every message and every failure kind."""
    return json.loads(_shipped("zh.json"))
