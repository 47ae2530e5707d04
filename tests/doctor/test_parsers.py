"""All sample texts parse to what is known of them, and no parser raises on anything."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbackend.compat import versions
from kvbackend.doctor import elf, loader
from kvbackend.doctor.collect.imports import parse_answer
from kvbackend.doctor.parsers import files, npu_smi, tools

from .roots import SAMPLES, sample
from .roots import elf as make_elf


def chips(name, *keys):
    return [tuple(c[k] for k in keys) for c in npu_smi.info(sample(f"npu-smi/{name}"))["chips"]]


def test_910b():
    info = npu_smi.info(sample("npu-smi/info_910b_8card_25.2.0.txt"))
    assert info["driver"] == "25.2.0"
    assert [(c["npu"], c["name"]) for c in info["chips"]] == [(i, "910B2") for i in range(8)]
    assert {c["npu"]: c["health"] for c in info["chips"] if c["health"] != "OK"} == {5: "Warning"}
    assert info["chips"][0]["hbm_mb"] == (57784, 65536)
    assert info["chips"][0]["bus"] == "0000:c1:00.0"
    assert [(p["npu"], p["pid"], p["memory_mb"]) for p in info["processes"]] == [(0, 139667, 54410)]


def test_910b_with_gaps():
    assert chips("info_910b_gap_slots_24.1.rc3.txt", "npu", "health") == [(0, "OK"), (2, "OK"), (5, "Alarm")]


@pytest.mark.parametrize(
    ("name", "processes"), [("info_a3_2card_4chip_25.0.rc1.1.txt", 2), ("info_a3_wide_26.0.rc2.txt", 1)]
)
def test_a3(name, processes):
    assert chips(name, "npu", "chip", "phy") == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert chips(name, "power_w", "name") == [
        (178.5, "Ascend910"),
        (None, "Ascend910"),
        (171.9, "Ascend910"),
        (None, "Ascend910"),
    ]
    assert len(npu_smi.info(sample(f"npu-smi/{name}"))["processes"]) == processes


def test_310p():
    name = "info_310p_duo_25.2.0.txt"
    assert chips(name, "npu", "chip", "hbm_mb") == [(2, 0, None), (2, 1, None), (32768, 0, None), (32768, 1, None)]
    assert chips(name, "memory_mb", "power_w")[0] == ((1529, 44280), None)


def test_950():
    info = npu_smi.info(sample("npu-smi/info_950pr_25.7.rc1.6.txt"))
    assert info["driver"] == "25.7.rc1.6"
    assert [(c["npu"], c["health"], c["hbm_mb"][1]) for c in info["chips"]] == [
        (0, "Alarm", 114688),
        (1, "OK", 114688),
        (2, "OK", 131072),
    ]
    assert info["processes"][0]["memory_mb"] == 85220  # its row is a character short
    assert chips("info_950pr_single_25.7.rc1.6.txt", "health", "hbm_mb") == [("OK", (5239, 131072))]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("board_910a_i0_23.0.5", ("23.0.5", "7.1.0.7.220", "d801", "")),
        ("board_910b_i0", ("25.2.0", "7.7.0.6.236", "d802", "")),
        ("board_950pr_i0", ("25.7.rc1.6", "9.0.0.105.229", "d806", "Ascend950PR_9579")),
        ("board_910b_i0_c0", ("", "7.7.0.6.236", "", "Ascend910B2C")),
        ("board_a3_i0_c0", ("", "7.7.0.1.231", "", "Ascend910_9382")),
    ],
)
def test_board(name, want):
    board = npu_smi.board(sample(f"npu-smi/{name}.txt"))
    assert tuple(board[k] for k in ("driver", "firmware", "pci_device", "soc")) == want


@pytest.mark.parametrize(
    ("name", "key", "ids"),
    [
        ("map_legacy_910a_m", "Chip Logic ID", [0, 1]),
        ("map_910b_m", "Chip Phy-ID", [0, 1]),
        ("map_a3_m", "Chip Logic ID", [0, 1, 2, 3]),
        ("map_950pr_m", "Chip Phy-ID", [0, 1, 2]),
    ],
)
def test_mapping_leaves_the_mcu_out(name, key, ids):
    assert [row[key] for row in npu_smi.mapping(sample(f"npu-smi/{name}.txt"))] == ids


def test_listing_and_health():
    assert npu_smi.listing(sample("npu-smi/list_l_2card.txt")) == [0, 1]
    assert npu_smi.health(sample("npu-smi/health_ok_i0.txt")) == {"status": "OK", "codes": []}
    assert npu_smi.health(sample("npu-smi/health_alarm_i0.txt")) == {
        "status": "Alarm",
        "codes": ["A4025021", "8C03A000"],
    }
    assert npu_smi.health(sample("npu-smi/health_warning_i0.txt")) == {"status": "Warning", "codes": ["80E01801"]}


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("err_dcmi_8020", "busy", "-8020"),
        ("err_dcmi_8005", "dcmi", "-8005"),
        ("err_bad_param", "usage", "-i"),
        ("err_libc_sec", "library", "libc_sec.so"),
        ("err_libdrvdsmi", "library", "libdrvdsmi_host.so"),
    ],
)
def test_errors(name, kind, detail):
    text = sample(f"npu-smi/{name}.txt")
    assert npu_smi.error(text) == {"kind": kind, "detail": detail}
    assert npu_smi.info(text) is None


def test_driver_and_firmware_files():
    driver = files.version_info(sample("files/driver_version.info.25.0.rc1.1"))
    assert (driver["version"], driver["firmware"]) == ("25.0.rc1.1", [("7.0.0", "7.7.99")])
    assert files.version_info(sample("files/driver_version.info.24.1.rc1"))["inner"] == "V100R001C15SPC006B220"
    assert files.version_info(sample("files/driver_version.info.950.25.7.rc1.6"))["version"] == "25.7.rc1.6"
    firmware = files.version_info(sample("files/firmware_version.info.7.7.0.1.231"))
    assert firmware["driver"] == [("23.0.0", "23.0.0"), ("24.0", "24.0"), ("24.1", "24.1"), ("25.0", "25.0")]
    assert versions.between("25.0.rc1.1", firmware["driver"]) is True
    assert versions.between("25.2.0", firmware["driver"]) is False


def test_install_files():
    for name in ("host", "950"):
        pairs = files.key_values(sample(f"files/etc_ascend_install.info.{name}"))
        assert pairs["Driver_Install_Path_Param"] == "/usr/local/Ascend"
    assert "Driver_Install_Path_Param" not in files.key_values(sample("files/etc_ascend_install.info.container_nokey"))
    assert (
        files.key_values(sample("files/etc_Ascend_ascend_cann_install.info"))["Toolkit_InstallPath"]
        == "/usr/local/Ascend/cann-9.1.0"
    )
    for version in ("8.2.RC1", "8.5.0", "9.1.0"):
        assert files.install_info(sample(f"files/ascend_toolkit_install.info.{version}"))["version"] == version
    nnae = files.install_info(sample("files/ascend_nnae_install.info.8.0.RC3"))
    assert nnae["compatible"] == [("V100R001C13", "V100R001C19"), ("V100R001C30", "V100R001C30")]
    assert files.inner_compatible("V100R001C15SPC006B220", nnae["compatible"])
    assert not files.inner_compatible("V100R001C20SPC001", nnae["compatible"])


def test_package_files():
    kernel = files.version_info(sample("files/opp_kernel_version.info.8.2.RC1"))
    assert (kernel["version"], kernel["release"], kernel["requires"]["amct_acl"]) == (
        "8.2.0.0.201",
        "8.2.RC1",
        ">=7.6, <=8.2",
    )
    assert files.version_info(sample("files/toolkit_version.info.8.2.RC1"))["requires"]["runtime"] == "8.2"
    assert files.version_info(sample("files/runtime_version.info.8.0.RC3"))["requires"] == {"driver": ">=23.0"}
    assert files.version_info(sample("files/compiler_version.info.9.1.0"))["release"] == "9.1.0"
    assert files.version_info(sample("files/ops_transformer_version.info.9.1.0"))["requires"]["asc_devkit"] == ">=9.1.0"
    assert files.version_cfg(sample("files/version.cfg.8.0.0"))["toolkit"]["running"] == ["8.0.0"]
    assert files.version_cfg(sample("files/version.cfg.two_installed"))["runtime"]["installed"] == ["8.0.RC3", "8.0.0"]
    assert files.atb_version(sample("files/atb_version.info.9.1.0")) == "9.1.0"


def test_cuda_and_host_tools():
    assert files.nvidia_proc_version(sample("files/proc_driver_nvidia_version.550.90.07")) == "550.90.07"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    assert files.nvidia_proc_version(line) == "570.86.15"
    assert [
        (g["index"], g["compute_cap"], g["driver"])
        for g in tools.nvidia_smi_query(sample("cuda/nvidia_smi_query_h200.csv"))
    ] == [("0", "9.0", "570.86.15"), ("1", "9.0", "570.86.15")]
    assert [
        tools.nvidia_smi_error(sample(f"cuda/nvidia_smi_{n}.txt")) for n in ("mismatch", "unknown", "nodriver")
    ] == ["mismatch", "unknown", "nodriver"]
    assert (
        tools.cuda_release(sample("cuda/nvcc_V_12.8.txt"))
        == tools.cuda_release(sample("cuda/ptxas_V_12.8.txt"))
        == "12.8.93"
    )
    assert tools.clang(sample("host/bisheng_version.txt")) == {"version": "15.0.5", "hash": "5c68a1cb1231"}
    assert tools.device_nodes(sample("host/dev_ls_910b.txt")) == [
        "davinci0",
        "davinci1",
        "davinci_manager",
        "devmm_svm",
        "hisi_hdc",
    ]
    assert tools.device_nodes(sample("host/dev_ls_950.txt")) == ["davinci0", "davinci1", "davinci_manager", "hisi_hdc"]
    assert tools.pci_ids(sample("host/lspci_acc_910b.txt")) == [
        {"bus": "c1:00.0", "device": "d802"},
        {"bus": "c2:00.0", "device": "d802"},
    ]
    assert tools.pci_ids(sample("host/lspci_acc_950.txt")) == [{"bus": "71:00.0", "device": "d806"}]
    assert files.host_config_gcc("#if __GNUC__ > 14\n#error") == 14


TEXT_PARSERS = (
    npu_smi.info,
    npu_smi.error,
    npu_smi.board,
    npu_smi.health,
    npu_smi.mapping,
    npu_smi.listing,
    files.version_info,
    files.install_info,
    files.version_cfg,
    files.atb_version,
    files.key_values,
    files.ranges,
    files.nvidia_proc_version,
    files.cuda_version_json,
    files.host_config_gcc,
    files.os_release,
    files.meminfo_bytes,
    tools.cuda_release,
    tools.nvidia_smi_query,
    tools.nvidia_smi_error,
    tools.clang,
    tools.first_version,
    tools.device_nodes,
    tools.pci_ids,
    tools.last_line,
    versions.parse,
    versions.base,
    lambda t: parse_answer(t, 0),
    lambda t: files.python_assignment(t, "cuda"),
    lambda t: files.status_field(t, "Uid"),
    lambda t: versions.within(t, t),
    lambda t: versions.fits(t, t),
)
CORPUS = sorted(p.read_text() for p in SAMPLES.glob("*/*"))


@st.composite
def damaged(draw):
    """A sample with a piece cut out, doubled or replaced."""
    text = draw(st.sampled_from(CORPUS))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 200)))
    return (
        text[:start]
        + draw(st.sampled_from(["", text[start:end] * 2, "\0", "|", " | ", "=", "9" * 40, "\x1b[31m", "é中"]))
        + text[end:]
    )


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=300), damaged()))
def test_no_text_parser_raises(text):
    for parse in TEXT_PARSERS:
        parse(text)


@pytest.mark.parametrize(
    "text", ["", "\0" * 1000, "x" * 1_000_000, "|" * 200_000, "[" * 100_000, "1." * 100_000, " : \n" * 100_000]
)
def test_odd_and_large_texts_parse_to_nothing(text):
    for parse in TEXT_PARSERS[:8]:
        assert not parse(text)


LIBRARY = make_elf(("a.so",), ("f",), ("g",), ("GLIBC_2.9",), soname="x.so", runpath="/a:/b")


def test_elf_reads_what_was_written():
    library = elf.parse(LIBRARY)
    assert (library.machine, library.soname, library.needed, library.runpath) == (
        "x86_64",
        "x.so",
        ("a.so",),
        ("/a", "/b"),
    )
    assert (library.undefined, library.defined, library.newest("GLIBC_2")) == (("g",), {"f"}, "2.9")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(LIBRARY)), st.integers(0, 60))
def test_binary_parsers_never_raise(noise, start, length):
    for data in (noise, LIBRARY[:start], LIBRARY[:start] + noise[:length] + LIBRARY[start + length :]):
        elf.parse(data)
        loader.parse_cache(data)
        loader.parse_cache(b"glibc-ld.so.cache1.1" + data)


def test_newest_orders_by_number():
    assert elf.newest(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.4\0", "GLIBC_2") == "2.34"
    assert elf.newest(b"nothing", "GLIBC_2") == ""


def test_symbols_of_an_edited_library_are_counted_by_its_hash_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch's wheels with CUDA, whose string table no longer follows the symbols: here none counts as near."""
    library = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    near = elf.parse(library)
    monkeypatch.setattr(elf, "_SYMBOLS_LIMIT", 0)
    assert near is not None
    assert len(near.defined) > 1000
    assert elf.parse(library) == near
