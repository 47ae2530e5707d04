"""`kvbackend tune`: the climb, the knee, and the profile that run, eval, plan and patch take."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; `kvbackend tune` needs it")

from kvbackend import ArgumentError, cli, profile
from kvbackend.integrations.transformers import new_cache, patch, unpatch
from kvbackend.planner.schemes import parse
from kvbackend.tune import Choice, knee, rungs, tune

from .test_eval import TEXT, folder, model, on_references, tokenizer  # noqa: F401  (fixtures)

LAYERS = 4
FOUND = profile.Profile("fp8_e4m3,rank=16", "tiny", 0.0125, 100, 400, 12.5, "0123456789abcdef", "profile.safetensors")


@pytest.fixture
def command(capsys):
    """`command(name, *options)` -> exit code, stdout, stderr."""

    def call(*options):
        try:
            code = cli.main([*map(str, options)])
        except SystemExit as stop:  # argparse
            code = stop.code
        return code, *capsys.readouterr()

    return call


class Fixed:
    """An evaluator whose figures are known: (percent lost, bytes, tokens per second) of some schemes."""

    head_dim = 64

    def __init__(self, **figures):
        self.figures, self.asked = {name.replace("__", ","): value for name, value in figures.items()}, []

    def document(self, schemes):
        return {"baseline": self._figures(0.0, 400, 10.0)}

    def _figures(self, lost, size, speed):
        entry = {"perplexity": 10 * (1 + lost / 100), "perplexity_change": lost / 100, "kl": 0.0}
        return entry | {"cache_bytes": size, "cache_bytes_fp16": 200, "tokens_per_s": speed}

    def evaluate(self, scheme):
        self.asked.append(scheme)
        found = self.figures.get(scheme)
        if isinstance(found, str):
            raise ArgumentError(found)
        return self._figures(*(found or (50.0, 100, 10.0)))


def climb(evaluator, **options):
    found = tune(evaluator, LAYERS, **options)
    return {rung["name"]: rung["accepted"] for rung in found["rungs"]}, found


def test_stages_build_on_what_was_accepted():
    evaluator = Fixed(**{
        "auto,rank=48": (0.5, 300, 9.0), "auto,rank=32": (5.0, 200, 9.0),
        "bf16,rank=48": (0.5, 150, 9.0), "fp8_e4m3,rank=48": (1.0, 75, 9.0), "int8,rank=48": (0.6, 80, 9.0),
    })  # fmt: skip
    accepted, found = climb(evaluator)
    assert evaluator.asked == [
        "auto,rank=48", "auto,rank=32",  # too much: 16 is not asked for, nor sparse attention over low rank
        "bf16,rank=48", "fp8_e4m3,rank=48", "int8,rank=48", "fp4_e2m1,rank=48",
        "fp8_e4m3,rank=48,2-3=fp4_e2m1", "fp8_e4m3,rank=48,0-1=fp4_e2m1",
    ]  # fmt: skip
    assert [name for name, value in accepted.items() if value] == [
        "auto", "auto,rank=48", "bf16,rank=48", "fp8_e4m3,rank=48",
    ]  # fmt: skip
    assert found["chosen"]["name"] == "fp8_e4m3,rank=48"
    assert found["chosen"]["settings"] == {"kv_format": "fp8_e4m3", "rank": "48"}


def test_sparse_attention_must_be_faster_and_layers_may_differ():
    evaluator = Fixed(**{
        "auto,topk=512": (0.1, 400, 10.4), "auto,topk=256": (0.2, 400, 20.0), "auto,topk=128": (0.3, 400, 15.0),
        "bf16,topk=256": (0.2, 200, 20.0), "fp8_e4m3,topk=256": "has no fp8",
        "bf16,topk=256,2-3=fp4_e2m1": (3.0, 150, 20.0), "bf16,topk=256,0-1=fp4_e2m1": (1.9, 150, 20.0),
    })  # fmt: skip
    accepted, found = climb(evaluator)
    assert not accepted["auto,topk=512"]  # no faster than noise makes it
    assert accepted["auto,topk=256"]
    assert not accepted["auto,topk=128"]
    assert found["chosen"]["name"] == "bf16,topk=256,0-1=fp4_e2m1"
    (told,) = [rung for rung in found["rungs"] if rung["name"] == "fp8_e4m3,topk=256"]
    assert told == {"name": "fp8_e4m3,topk=256", "stage": "format", "accepted": False, "reason": "has no fp8"}


def test_the_limit_is_the_callers():
    figures = {"bf16": (0.0, 200, 10.0), "fp8_e4m3": (3.0, 100, 10.0)}
    assert climb(Fixed(**figures))[1]["chosen"]["name"] == "bf16"
    assert climb(Fixed(**figures), max_loss=0.03)[1]["chosen"]["name"] == "fp8_e4m3"
    with pytest.raises(ArgumentError, match="max_loss is 0; it must be above 0"):
        climb(Fixed(), max_loss=0)


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "1000%"])
def test_a_limit_that_cannot_be_kept_is_refused_before_any_work(limit, command, tmp_path):
    code, out, err = command("tune", "--model", tmp_path / "nowhere", "--max-loss", limit)
    assert (code, out) == (2, "")
    assert f"argument --max-loss: {limit} must be above 0 and below 1000: 2 allows two percent more" in err


def test_every_rung_is_a_scheme():
    for _, make in rungs(64, 30):
        for so_far in (Choice(), Choice("fp8_e4m3", "48")):
            for choice in make(so_far):
                assert parse(choice.scheme).name == choice.scheme
    assert [stage for stage, _ in rungs(None, 1)] == ["format", "layer ratios"]


def test_knee():
    points = [("a", 400, 10.0), ("b", 200, 10.1), ("c", 100, 10.4), ("d", 50, 15.0), ("worse", 210, 12.0)]
    measured = [dict(name=name, cache_bytes=size, perplexity=loss) for name, size, loss in points]
    assert knee(measured) == "c"
    assert knee(measured[:1]) == "a"


# ------------------------------------------------------------------------------------------------------ the profile


def test_profiles_come_back(tmp_path):
    path = tmp_path / "profile.toml"
    FOUND.write(path)
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text()
    assert 'schema = "kvbackend-profile/1"\nscheme = "fp8_e4m3,rank=16"\n' in text
    read = profile.read(path)
    assert read.calibration == str(tmp_path / "profile.safetensors")
    assert read.scheme == FOUND.scheme
    assert (read.perplexity_change, read.cache_bytes, read.tokens_per_s) == (0.0125, 100, 12.5)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot be read"),
        ("a = ", "cannot be read"),
        ('schema = "kvbackend-profile/2"', "is no kvbackend-profile/1"),
        ('schema = "kvbackend-profile/1"\nscheme = "int8"', "lacks model, perplexity_change"),
    ],
)
def test_profiles_that_are_refused(text, match, tmp_path):
    path = tmp_path / "profile.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match=match):
        profile.read(path)


def test_unknown_keys_of_a_profile_are_named(tmp_path):
    path = tmp_path / "profile.toml"
    FOUND.write(path)
    path.write_text(path.read_text() + "speed = 1\n")
    with pytest.raises(ArgumentError, match="has speed; its keys are scheme, model"):
        profile.read(path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("perplexity_change = nan", r"perplexity_change = nan; it must be a number above -1: correct it"),
        ("perplexity_change = -1.5", r"perplexity_change = -1.5; it must be a number above -1"),
        ("cache_bytes = 0", r"cache_bytes = 0; it must be a whole number above 0"),
        ("cache_bytes_fp16 = 1.5", r"cache_bytes_fp16 = 1.5; it must be a whole number"),
        ("tokens_per_s = -2", r"tokens_per_s = -2; it must be a number above 0"),
        ('tokens_per_s = "fast"', r"tokens_per_s = 'fast'; it must be a number"),
        ("model = 3", r"model = 3; it must be a text"),
        ('model = ""', r"model = ''; it must be a text"),
        ('scheme = "fp9"', r"a scheme that cannot be had; kv_format is 'fp9'; it must be native or one of"),
        ('scheme = "bf16,evict=snapkv:8"', r"cannot be had; budget is 8 tokens; SnapKV always keeps 32 recent"),
    ],
)
def test_values_that_no_measurement_gives_are_refused(line, match, tmp_path):
    path = tmp_path / "profile.toml"
    FOUND.write(path)
    name, lines = line.partition(" ")[0], path.read_text().splitlines(keepends=True)
    path.write_text("".join(f"{line}\n" if old.startswith(f"{name} ") else old for old in lines))
    with pytest.raises(ArgumentError, match=match):
        profile.read(path)


def test_a_profile_of_another_model_is_refused(command, folder, tmp_path):  # noqa: F811
    path = tmp_path / "profile.toml"
    replace(FOUND, model="large").write(path)
    for name, *rest in (["run", "abc"], ["eval"]):
        code, out, err = command(name, *rest, "--model", folder, "--profile", path)
        assert (code, out) == (2, "")
        assert f"--profile was measured on large; the model is {folder.name}, which may lose more" in err


def test_a_place_where_nothing_can_be_written(command, tmp_path):
    for place, why in (
        (tmp_path / "nowhere" / "profile.toml", "its folder must exist"),
        (tmp_path, "names no file"),
        ("", "names no file"),
    ):
        code, out, err = command("tune", "--output", place)
        assert (code, out, why in err) == (2, "", True)
    with pytest.raises(ArgumentError, match="its folder must exist and be writable"):
        FOUND.write(tmp_path / "nowhere" / "profile.toml")


def test_python_310_is_told_about_tomli(monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ArgumentError, match="run pip install tomli"):
        profile.toml()


# ------------------------------------------------------------------------------------------------------ end to end


def test_tune_writes_what_the_others_take(command, folder, model, tmp_path):  # noqa: F811
    text, path = tmp_path / "text.txt", tmp_path / "found.toml"
    text.write_text(TEXT)
    sizes = "--context", 200, "--scored", 40
    code, out, err = command(
        "tune", "--model", folder, "--text", text, *sizes, "--max-loss", "3%", "--output", path, "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["schema"] == "kvbackend-tune/1"
    assert document["profile"] == str(path)
    assert {rung["stage"] for rung in document["rungs"]} >= {"baseline", "low rank", "format"}
    (refused,) = [rung for rung in document["rungs"] if "reason" in rung]
    assert (refused["name"], refused["accepted"]) == ("fp4_e2m1,rank=24", False)
    assert "head_dim is 24; fp4_e2m1 needs a multiple of its group of 16" in refused["reason"]
    for rung in document["rungs"]:
        if rung is refused:
            continue
        assert rung.keys() >= {"name", "settings", "perplexity_change", "cache_bytes", "tokens_per_s", "accepted"}
        assert not rung["accepted"] or rung["perplexity_change"] <= 0.03
    found = profile.read(path)
    chosen = next(rung for rung in document["rungs"] if rung["name"] == document["chosen"])
    assert (found.scheme, found.cache_bytes) == (document["chosen"], chosen["cache_bytes"])
    assert found.scheme == "fp8_e4m3,rank=24"
    assert found.cache_bytes < found.cache_bytes_fp16 / 2
    assert (tmp_path / "found.lowrank.safetensors").is_file()

    code, out, err = command("run", "--model", folder, "--profile", path, "abc", "--max-new-tokens", 3, "--json")
    assert code == 0, err
    assert json.loads(out)["scheme"] == found.scheme
    code, _, err = command("run", "--model", folder, "--profile", path, "--kv-format", "int8", "abc")
    assert (code, "--profile is given with --kv-format" in err) == (2, True)
    code, out, err = command(
        "eval",
        "--model",
        folder,
        "--text",
        text,
        "--quick",
        "--contexts",
        60,
        "--scored",
        20,
        "--profile",
        path,
        "--json",
    )
    assert code == 0, err
    assert [entry["name"] for entry in json.loads(out)["schemes"]] == [found.scheme]
    code, out, err = command("plan", folder / "config.json", "--profile", path, "--json")
    assert code == 0, err
    assert json.loads(out)["scheme"] == found.scheme
    patch(model, profile=path, block_size=4)
    try:
        cache = new_cache(model)
        assert cache.block_size == 4
        assert cache.options.kv_format == "fp8_e4m3"
        assert [side.rank for side in cache.options.low_rank[0]] == [24, 24]
    finally:
        unpatch(model)
