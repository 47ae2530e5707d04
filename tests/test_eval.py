"""`kvbackend eval`: figures against one forward of transformers, the sample, comparing, drawing; on tiny models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; `kvbackend eval` needs it")

import kvbackend
from kvbackend import ArgumentError, cli, model_store, texts
from kvbackend.evaluate import Evaluator, Settings, compare, default_schemes, granularity_sweep, measure, passages
from kvbackend.evaluate.evaluate import configuration_id, pareto
from kvbackend.evaluate.sample import digest
from kvbackend.planner.schemes import parse

from .integrations.models import MODELS, build
from .integrations.test_compressed import Rounded

DIM, CONTEXT, SCORED, ROWS = 32, 300, 60, 2
SETTINGS = Settings(
    contexts=(CONTEXT,), rows=ROWS, scored=SCORED, chunk=50, code_context=70, code_scored=30, new_tokens=9
)
TEXT = texts.builtin()[:20000]
KEYS = {
    "name", "perplexity", "perplexity_change", "perplexity_change_margin", "kl", "top1_agreement", "needle",
    "cache_bytes", "cache_bytes_fp16", "backends", "exact_recall", "code", "repetition", "loss_by_position", "pareto",
    "tokens_per_s",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def on_references():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with kvbackend.use("reference"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each character of printable ASCII."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<eos>", *(chr(code) for code in range(32, 127)), "\n"]
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<eos>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>")


@pytest.fixture(scope="module")
def model():
    """One layer, so that keys are the same to the bit however they are cached."""
    return build("llama", head_dim=DIM, num_hidden_layers=1, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def evaluator(model, tokenizer):
    with Evaluator(model, tokenizer, "tiny", TEXT, "manual", SETTINGS) as made:
        yield made


@pytest.fixture
def command(capsys):
    """`command(*options)` -> exit code, stdout, stderr."""

    def call(*options):
        try:
            code = cli.main(["eval", *map(str, options)])
        except SystemExit as stop:  # argparse
            code = stop.code
        return code, *capsys.readouterr()

    return call


# ---------------------------------------------------------------------------------------------- what is measured


def one_forward(model, passage, *names):
    """Log-probabilities [rows, scored, vocabulary] of a passage in one forward of transformers, rows through codecs."""
    from kvbackend.integrations.transformers import patching, unpatch

    unpatch(model)
    cache = {patching.cache_argument(model): Rounded(*names)} if names else {}
    with torch.no_grad():
        logits = model(passage.ids, **cache).logits.double()
    return logits[:, passage.context - 1 : passage.context + passage.scored - 1].log_softmax(-1)


def loss(logprobs, passage):
    targets = passage.ids[:, passage.context : passage.context + passage.scored, None]
    return -float(logprobs.gather(-1, targets).mean())


def test_full_precision_is_one_forward_of_transformers(model, evaluator):
    document = evaluator.document([])
    prose, code = evaluator.sample
    assert document["baseline"]["perplexity"] == pytest.approx(
        math.exp(loss(one_forward(model, prose), prose)), rel=1e-4
    )
    logprobs = one_forward(model, code)
    assert document["baseline"]["code"]["perplexity"] == pytest.approx(math.exp(loss(logprobs, code)), rel=1e-4)
    hits = logprobs.argmax(-1) == code.ids[:, code.context : code.context + code.scored]
    assert document["baseline"]["code"]["accuracy"] == pytest.approx(float(hits.double().mean()), abs=1e-5)
    assert (document["text_tokens"], document["code_tokens"]) == (ROWS * SCORED, 30)


@pytest.mark.parametrize("scheme", ["fp8_e4m3", "mxfp4", "int8/fp4_e2m1"])
def test_chunks_are_scored_against_codes(scheme, model, evaluator):
    """Perplexity, divergence and agreement are those of eager attention over rounded rows, in one forward."""
    found = evaluator.evaluate(scheme)
    pairs = [(one_forward(model, passage), one_forward(model, passage, scheme)) for passage in evaluator.sample]
    prose = evaluator.sample[0]
    assert found["perplexity"] == pytest.approx(math.exp(loss(pairs[0][1], prose)), rel=1e-4)
    change = math.exp(loss(pairs[0][1], prose) - loss(pairs[0][0], prose)) - 1
    assert found["perplexity_change"] == pytest.approx(change, abs=2e-5)
    assert change != 0
    divergences = torch.cat([(full.exp() * (full - own)).sum(-1).flatten() for full, own in pairs])
    assert found["kl"] == pytest.approx(float(divergences.mean()), rel=1e-2, abs=2e-6)
    agreed = torch.cat([(full.argmax(-1) == own.argmax(-1)).flatten() for full, own in pairs])
    assert found["top1_agreement"] == pytest.approx(float(agreed.double().mean()), abs=0.02)
    fmt = [kvbackend.formats.get(side) for side in kvbackend.formats.pair(scheme)]
    fixed = sum(side.fixed_scale_bytes(2, DIM) for side in fmt)
    blocks = -(-(CONTEXT + SCORED) // 16) * ROWS
    assert found["cache_bytes"] == blocks * 16 * sum(side.bytes_per_token(2, DIM) for side in fmt) + fixed
    assert found["cache_bytes_fp16"] == blocks * 16 * 2 * 2 * DIM * 2


def test_the_margin_is_that_of_runs_of_tokens(evaluator):
    """Independent runs, dependent tokens: the standard error of the means of runs, where runs are equally long."""
    generator = torch.Generator().manual_seed(0)
    full, own = (measure.Scores(losses=[("code", 5, torch.rand(1, 9))]) for _ in range(2))
    differences = torch.randn(2, 3, 8, generator=generator) * 0.01 + 0.3  # rows, runs, tokens
    for part in differences.flatten(2).repeat_interleave(4, -1).unbind(1):  # 4 tokens alike: 32 of a run are 8 numbers
        base = torch.rand(2, 32, generator=generator, dtype=torch.float64)
        full.losses.append(("prose", 10, base))
        own.losses.append(("prose", 10, base + part))
    means = differences.double().mean(-1).flatten()
    expected = 1.96 * float(means.std(correction=0)) / len(means) ** 0.5
    assert measure.margin(own, full) == pytest.approx(expected, rel=1e-9)
    assert measure.margin(full, full) == 0
    found = evaluator.evaluate("mxfp4")
    kept = evaluator.baseline.scores
    scores = evaluator._run("mxfp4", evaluator.baseline).scores
    assert found["perplexity_change_margin"] == pytest.approx(
        measure.margin(scores, kept) * (1 + found["perplexity_change"]), abs=2e-6
    )
    assert found["perplexity_change_margin"] > 0


def test_full_precision_as_a_scheme_loses_nothing(evaluator):
    document = evaluator.document(["fp32"])
    (found,) = document["schemes"]
    assert found.keys() == KEYS
    assert (found["perplexity_change"], found["kl"], found["top1_agreement"]) == (0, 0, 1)
    assert found["code"]["same_continuation"] == SETTINGS.new_tokens
    assert found["loss_by_position"] == document["baseline"]["loss_by_position"]
    buckets = found["loss_by_position"]
    assert [(bucket["from"], bucket["to"]) for bucket in buckets] == [(300, 315), (315, 330), (330, 345), (345, 360)]
    mean = sum(bucket["loss"] for bucket in buckets) / 4
    assert mean == pytest.approx(math.log(found["perplexity"]), abs=1e-3)


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [
        ("auto,evict=window:40", 40),
        ("auto,evict=snapkv:25%:observed=8", 75 + SCORED),
        ("auto,rank=8", CONTEXT + SCORED),
    ],
)
def test_policies_act_where_the_context_ends(scheme, rows, model, evaluator):
    found = evaluator.evaluate(scheme)
    assert found["perplexity_change"] != 0
    companions = {"window": 4, "snapkv": 4 * 3}.get(scheme[11:17].rstrip(":4"), 0)
    width = 8 if "rank" in scheme else DIM
    assert found["cache_bytes"] == ROWS * -(-rows // 16) * 16 * (2 * 2 * width * 4 + companions)
    assert found["cache_bytes_fp16"] == ROWS * -(-(CONTEXT + SCORED) // 16) * 16 * 2 * 2 * DIM * 2


def test_scales_of_a_calibration_text(model, tokenizer, evaluator):
    """Scales from the largest numbers: nothing saturates, and 4 bits with one scale become possible."""
    found = evaluator.evaluate("fp4_e2m1:channel,scales=amax")
    with pytest.raises(ArgumentError, match="needs one of shape"):
        evaluator.evaluate("fp4_e2m1:channel")
    coarse = evaluator.evaluate("fp4_e2m1:tensor,scales=amax")
    assert 0 < found["kl"] < coarse["kl"]
    with pytest.raises(ArgumentError, match="has scales=amax with a rank"):
        evaluator.evaluate("fp8_e4m3,scales=amax,rank=16")


# ------------------------------------------------------------------------------------------------------ the sample


def test_the_sample_is_fixed_and_asks_for_what_it_planted(tokenizer):
    sample = passages(tokenizer, TEXT, SETTINGS)
    assert digest(sample) == digest(passages(tokenizer, TEXT, SETTINGS))
    assert digest(sample) != digest(passages(tokenizer, "x" + TEXT, SETTINGS))
    prose, code = sample
    assert code.ids.shape == (1, 70 + 30 + 1)
    assert {(query.kind, query.row) for query in prose.queries} == {
        (kind, row) for kind in ("needle", "exact") for row in range(ROWS)
    }
    answers = []
    for query in prose.queries:
        context = decode(tokenizer, prose.ids[query.row, :CONTEXT])
        answer = decode(tokenizer, prose.ids[query.row, query.start : query.end])
        question = decode(tokenizer, prose.ids[query.row, : query.start]).rsplit("\n", 1)[1]
        assert answer.strip().isdigit()
        assert question + answer in context
        answers.append(answer)
    assert len(set(answers)) == len(answers)
    scored = decode(tokenizer, prose.ids[0, CONTEXT : CONTEXT + SCORED])
    at = TEXT.replace("<eos>", "?").index(scored)
    assert at >= texts.CALIBRATION_TOKENS + CONTEXT


def decode(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def test_found_answers_are_counted():
    query = measure.Query("needle", 1, 5, 7)
    right = {5: torch.tensor([False, True]), 6: torch.tensor([False, True])}
    assert measure._found(query, right)
    assert not measure._found(query, right | {6: torch.tensor([True, False])})


def test_repetition():
    assert measure.repetition([1, 2, 3, 4, 5, 6]) == 0
    assert measure.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert measure.repetition([7] * 8) == pytest.approx(4 / 5)
    assert measure.repetition([1]) == 0


def test_no_passage_of_the_builtin_text_is_met_twice():
    chapters = " ".join(texts.builtin().split())
    for sentence in ("attribute references", "Dictionaries can be created by"):
        assert sentence.lower() in chapters.lower()
    paragraphs = [part for part in texts.builtin().split("\n\n") if len(part) > 400]
    assert len(set(paragraphs)) > 0.97 * len(paragraphs)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (Settings(contexts=(10000,), scored=10000), "passages of 20000 are wanted"),
        (Settings(contexts=(900,), scored=200), "the model's context is 1024"),
    ],
)
def test_samples_that_cannot_be_made(settings, match, tokenizer):
    with pytest.raises(ArgumentError, match=match):
        passages(tokenizer, TEXT, settings, 1024)


# ----------------------------------------------------------------------------------------------------- the command


def test_default_schemes_are_schemes():
    for names in (default_schemes(64), default_schemes(64, True), default_schemes(None), granularity_sweep(64)):
        assert len({parse(name).name for name in names}) == len(names)
    assert "fp8_e4m3:128" not in granularity_sweep(64)
    assert "fp8_e4m3:channel,scales=amax" in granularity_sweep(64)
    assert not any("rank" in name for name in default_schemes(None))


def test_pareto():
    entries = [dict(name=name, cache_bytes=size, perplexity=loss) for name, size, loss in
               [("a", 10, 5.0), ("b", 20, 4.0), ("c", 20, 6.0), ("d", 10, 5.0), ("e", 5, 9.0)]]  # fmt: skip
    assert pareto(entries) == {"a", "b", "d", "e"}


SMALL = "--contexts", "60", "--scored", "20", "--rows", "1", "--quick"


def test_json_plot_and_comparison(command, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    common = "--model", folder, "--text", text, *SMALL
    paths = [tmp_path / f"{name}.json" for name in ("one", "two", "other")]
    picture = tmp_path / "picture.png"
    for path, options in zip(
        paths, (["int8", "--plot", picture], ["int8,evict=window:20"], ["int8", "--chunk", 7]), strict=True
    ):
        code, out, err = command(*common, "--json", *options)
        assert code == 0, err
        path.write_text(out)
    documents = [json.loads(path.read_text()) for path in paths]
    first = documents[0]
    assert first["schema"] == "kvbackend-eval/1"
    assert first["model"] == "tiny"
    assert first["schemes"][0].keys() == KEYS
    assert first["configuration"]["text_sha256"] == texts.digest(TEXT)
    assert first["configuration_id"] == configuration_id(first["configuration"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, err = command("--compare", *paths[:2])
    assert code == 0, err
    assert all(word in out for word in ("full precision", "one.json", "two.json", "int8"))
    code, out, _ = command("--compare", *paths[:2], "--json")
    assert len(json.loads(out)["compared"]) == 2
    code, out, err = command("--compare", *paths)
    assert (code, out) == (2, "")
    assert "differ in chunk 128 and 7; figures compare under one configuration only" in err


def test_table(command, folder):
    code, out, err = command("--model", folder, *SMALL, "int8")
    assert code == 0, err
    assert err == ""
    for text in ("full precision", "int8 *", "of fp16", "perplexity", " ±", "top-1", "configuration"):
        assert text in out


def test_bar_on_a_terminal(command, folder, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed; without it nothing is shown while it runs")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    code, out, err = command("--model", folder, *SMALL, "int8", "--json")
    assert code == 0
    assert json.loads(out)["schemes"][0]["name"] == "int8"
    assert "loading the model" in err
    assert "int8" in err


def test_models_of_latent_rows(tokenizer):
    latent = build("deepseek_v3", **{**MODELS["deepseek v3"][1], "kv_lora_rank": 32, "max_position_embeddings": 1024})
    with Evaluator(latent, tokenizer, "latent", TEXT, "manual", SETTINGS) as made:
        assert made.head_dim is None
        document = made.document(["fp8_e4m3", "int4", "bf16,evict=window:40", "bf16,evict=snapkv:25%"], strict=False)
    assert [entry["name"] for entry in document["schemes"]] == ["fp8_e4m3", "bf16,evict=window:40"]
    assert "MLA's latent row is both" in document["left_out"][0]["reason"]
    assert "would need keys of kv heads" in document["left_out"][1]["reason"]
    found = document["schemes"][0]
    assert found["cache_bytes_fp16"] == ROWS * -(-(CONTEXT + SCORED) // 16) * 16 * 2 * (32 + 4) * 2
    assert 0 < abs(found["perplexity_change"]) < 0.1


def test_schemes_that_a_model_cannot_have_are_left_out_of_lists(command, folder):
    code, out, err = command("--model", folder, *SMALL, "--json")
    assert code == 0, err
    document = json.loads(out)
    # of 60 tokens a quarter has no room for the 32 that SnapKV observes, and a half neither
    left_out = {entry["name"] for entry in document["left_out"]}
    assert left_out == {name for name in default_schemes(DIM, quick=True) if "snapkv" in name}
    assert {entry["name"] for entry in document["schemes"]} == {*default_schemes(DIM, quick=True)} - left_out
    assert "budget is 15 tokens" in document["left_out"][0]["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["int3"], "kv_format is 'int3'; it must be native or one of"),
        (["int8,keep=8", *SMALL], "has keep without a policy"),
        (["--text", "/nowhere"], "text /nowhere cannot be read"),
        (["--rows", "0"], "0 must be 1 or more"),
        (["--compare", "a.json"], "--compare names one file"),
        (["--compare", "/nowhere", "b"], "/nowhere cannot be read"),
        (["--contexts", "2000"], "the model's context is 1024"),
        (["int8", *SMALL, "--plot", "/nowhere/x.png"], "--plot is '/nowhere/x.png'; it must be a .png"),
        (["int8", *SMALL, "--plot", "x.table"], "--plot is 'x.table'; it must be a .png"),
        (["int8", *SMALL, "--plot", ""], "--plot is ''; it must be a .png"),
        (["--profile", ""], "profile '' cannot be read"),
        (["--calibration", "", *SMALL], " is no file; it must be one that Calibration.save wrote"),
        (["int8", "--calibration", "x"], "--calibration is 'x', but no SCHEME has a rank"),
        (["int4,topk=8", *SMALL], "sparse is given with kv_format 'int4', whose keys share scales across tokens"),
        (["int8,recent=8,topk=8", *SMALL], "sparse is given with keep_recent or keep_sinks"),
        (["fp8_e4m3,1=int8", *SMALL], "names layers 1-1; the model has layers 0-0"),
        (["fp8_e4m3:64", *SMALL], "head_dim is 32; fp8_e4m3:64 needs a multiple of its group of 64"),
        (["bf16,rank=33", *SMALL], "rank is 33; a head has 32 dims"),
        (["bf16/fp16", *SMALL], "rows that are not codes have one dtype"),
        (["fp4_e2m1:tensor", *SMALL], "fp4_e2m1:tensor' needs one of shape [1]"),
        (["int8", "bf16,evict=snapkv:50%", *SMALL], "budget is 30 tokens; SnapKV always keeps 32 recent tokens"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_measured(command, folder, options, message, monkeypatch):
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("the baseline ran"))
    code, out, err = command("--model", folder, *options)
    assert code == 2
    assert out == ""
    assert message in err


def test_sparse_models_are_refused(tokenizer):
    from types import SimpleNamespace

    sparse = SimpleNamespace(config=SimpleNamespace(model_type="deepseek_v32", max_position_embeddings=1024))
    with pytest.raises(ArgumentError, match="model is tiny, whose attention is sparse; commands run dense caches only"):
        Evaluator(sparse, tokenizer, "tiny", TEXT, "manual", SETTINGS)


def test_documents_of_other_commands_are_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": "kvbackend-run/1"}))
    with pytest.raises(ArgumentError, match="is no kvbackend-eval/1 document"):
        compare.read(str(path))


def test_default_model_keeps_its_text_in_half_the_bytes(command):
    try:
        distribution(model_store.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{model_store.PACKAGE} is not installed; it carries the default model")
    code, out, err = command("--quick", "--contexts", 128, "--scored", 64, "--rows", 1, "--json", "fp8_e4m3")
    assert code == 0, err
    document = json.loads(out)
    (found,) = document["schemes"]
    assert 10 < document["baseline"]["perplexity"] < 60
    assert (
        0 < found["kl"] < 0.03
    )  # the perplexity of 64 tokens scatters by some percent with the text, which is Python's
    assert 0.5 <= found["cache_bytes"] / found["cache_bytes_fp16"] < 0.501
    assert found["top1_agreement"] > 0.9


def test_help_and_comparing_take_no_torch(tmp_path):
    lines = "import sys", "from kvbackend.cli import main", "from kvbackend.evaluate import compare, plot"
    lines += "try: main(['eval', '--help'])", "except SystemExit: main(['tune', '--help'])"
    code = "\n".join([*lines, "finally: assert 'torch' not in sys.modules"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
    assert "--max-loss" in done.stdout
