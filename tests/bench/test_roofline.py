"""The roofline against numbers worked out by hand, and its data against what is published."""

from __future__ import annotations

import json
import re

import pytest

from kvbackend import ArgumentError, cli
from kvbackend.bench import roofline
from kvbackend.bench.roofline import Npu, Work, find, predict
from kvbackend.ops import registry

SIMPLE = Npu("simple", memory=1e12, cube=1e14, vector=1e13, l2_bytes=1 << 20)


@pytest.mark.parametrize(
    ("work", "us", "bound"),
    [
        (Work("a", "", 2_000_000, 100_000_000, 10_000_000), 2.0, "memory"),  # 2 MB at 1 TB/s; 1 us; 1 us
        (Work("b", "", 1_000_000, 500_000_000, 20_000_000), 5.0, "cube"),  # 1 us; 500 MFLOP at 100 TFLOPS; 2 us
        (Work("c", "", 1_000_000, 100_000_000, 70_000_000), 7.0, "vector"),  # 1 us; 1 us; 70 MFLOP at 10 TFLOPS
    ],
)
def test_the_slowest_unit_bounds(work, us, bound) -> None:
    found = predict(SIMPLE, work)
    assert (found.predicted_us, found.bound) == (pytest.approx(us), bound)
    assert found.predicted_us == max(found.memory_us, found.cube_us, found.vector_us)
    assert found.fits_l2 == (work.moved_bytes <= 1 << 20)


@pytest.mark.parametrize(
    ("soc", "tb_per_s", "cube_tflops", "vector_tflops"),
    [
        ("ascend950pr_9589", 1.6, 432, 27),  # published: 1.6 TB/s, 432 bf16, 54 fp16 of the vector cores
        ("ascend950pr_9579", 1.6, 378, None),  # published for the PCIe card: 378
        ("ascend950dt_9581", 4.0, None, None),
        ("ascend910b2", 1.6, 353.9, 11),  # published: 353.9 and 22
        ("ascend950pr_958b", 1.6 * 27 / 31, None, None),
        ("ascend950dt_9588", 4.0 * 54 / 80, None, None),
    ],
)
def test_chips_are_as_published(soc, tb_per_s, cube_tflops, vector_tflops) -> None:
    npu = find(soc)
    assert npu.memory == pytest.approx(tb_per_s * 1e12)
    assert cube_tflops is None or npu.cube == pytest.approx(cube_tflops * 1e12, rel=2e-3)
    assert vector_tflops is None or npu.vector == pytest.approx(vector_tflops * 1e12, rel=6e-3)


@pytest.mark.parametrize(  # as bishengir-compile-a5 of ascendnpu-ir 1.2.0 prints them
    ("names", "cores"),
    [(r"950(pr|dt)_95[9a]\w", 36), (r"950(pr|dt)_958\w", 32), (r"950(pr|dt)_957\w", 28), (r"910b[12]|910_93[89]\d", 24),
     (r"910b3|910_937\d", 20)],
)  # fmt: skip
def test_cores_are_those_of_the_compiler(names, cores) -> None:
    socs = roofline.table()["socs"]
    chosen = [soc for name, soc in socs.items() if re.fullmatch(f"ascend({names})", name)]
    assert chosen
    assert {soc["cube_cores"] for soc in chosen} == {cores}


def works() -> dict[tuple[str, str], Work]:
    return {(work.op, work.case): work for work in roofline.works()}


def test_bytes_and_operations_by_hand() -> None:
    found = works()
    decode = found["paged_attention", "decode"]
    # 32 x 8192 tokens of 8 heads x 256 numbers x 2 bytes; a query and a result of 32 x 32 x 128 x 2 bytes
    assert decode.moved_bytes == 1_073_741_824 + 524_288
    assert decode.cube == 32 * 32 * 8192 * 512  # per head and token 128 products for the logit, 128 for the value
    mla = found["mla_attention", "decode"]
    assert mla.moved_bytes == 32 * 8192 * 1152 + 32 * 128 * 1088 * 2
    assert mla.cube == 32 * 128 * 8192 * 2 * 1088
    assert mla.cube / (32 * 8192 * 1152) == pytest.approx(241.8, abs=0.1)  # operations a byte of the cache
    prefill = found["paged_attention", "prefill"]
    assert prefill.cube == 32 * 4 * 128 * sum(range(1, 4097))
    assert found["reshape_and_cache", "prefill"].moved_bytes == 4096 * (4096 + 4096 + 8)
    absorb = found["absorb_q", "decode"]
    assert absorb.moved_bytes == 128 * 128 * 512 * 2 + 32 * 128 * (128 + 512) * 2
    assert absorb.cube == 2 * 32 * 128 * 128 * 512
    assert found["copy_blocks", "64 blocks of keys"].moved_bytes == 2 * 64 * 128 * 8 * 128 * 2


@pytest.mark.parametrize(("soc", "bound"), [("ascend950pr_9589", "memory"), ("ascend950dt_9591", "cube")])
def test_mla_decode_lies_between_the_ridges_of_two_chips(soc, bound) -> None:
    """240 operations a byte: below 432e12 / 1.6e12 = 270, above 530.8e12 / 4e12 = 133."""
    found = predict(find(soc), works()["mla_attention", "decode"])
    assert found.bound == bound
    wanted = {"memory": (32 * 8192 * 1152 + 32 * 128 * 1088 * 2) / 1.6e12, "cube": 32 * 128 * 8192 * 2176 / 530.8e12}
    assert found.predicted_us == pytest.approx(wanted[bound] * 1e6, rel=1e-3)


def test_every_op_is_predicted_or_says_why_not() -> None:
    assert {work.op for work in roofline.works()} | set(roofline.LEFT_OUT) == set(registry)
    assert not {work.op for work in roofline.works()} & set(roofline.LEFT_OUT)


def test_the_command_says_that_it_predicts(capsys) -> None:
    assert cli.main(["bench", "--model", "Ascend950PR_9599", "paged_attention"]) == 0
    text = capsys.readouterr().out
    assert "PREDICTION for ascend950pr_9599, nothing was measured" in text
    assert "531 TFLOPS" in text
    assert all(sentence[:40] in text for sentence in roofline.ASSUMPTIONS)
    assert cli.main(["bench", "--model", "ascend910b1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prediction"] is True
    assert document["assumptions"] == list(roofline.ASSUMPTIONS)
    assert {row["op"] for row in document["results"]} == set(registry) - {"swap_blocks"}


@pytest.mark.parametrize("name", ["ascend950", "ascend910b4", "h100"])
def test_other_chips_are_refused_with_the_list(name) -> None:
    with pytest.raises(ArgumentError, match=rf"--model is '{name}'; .*ascend950pr_9599.*: choose one"):
        find(name)
