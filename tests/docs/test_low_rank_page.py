"""The bytes on docs/low-rank.md are those of the formulas, and its links to code are real."""

import re
from pathlib import Path

import pytest

from trl_alpharl.lowrank.config import PRESETS
from trl_alpharl.shapes import adamw_bytes, decoder_matrices, low_rank_bytes, low_rank_shape

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/low-rank.md").read_text()
MODELS = {
    "SmolLM2-135M": (576, 1536, 30, 192, 49152, True),
    "Llama-2-7B": (4096, 11008, 32, 4096, 32000, False),
    "Llama-2-70B": (8192, 28672, 80, 1024, 32000, False),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_of_a_model(model):
    shapes = [shape for _, shape in decoder_matrices(*MODELS[model])]
    count = sum(rows * columns for rows, columns in shapes)

    def ours(rank, **kinds):
        return sum(low_rank_bytes(low_rank_shape(shape, rank), **kinds) for shape in shapes)

    expected = [
        count,
        adamw_bytes(count, "bf16", "fp32"),
        adamw_bytes(count),
        adamw_bytes(count, "bf16", "8bit"),
        ours(64),
        ours(64, accumulator="bf16"),
        ours(16),
    ]
    (row,) = re.findall(rf"^\| {re.escape(model)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert row.split(" | ") == [f"{value / 1e9:.3f}" for value in expected]


def test_the_share_of_adamw_s_bytes_that_the_page_promises():
    for sizes in MODELS.values():
        shapes = [shape for _, shape in decoder_matrices(*sizes)]
        ours = sum(low_rank_bytes(low_rank_shape(shape, 64)) for shape in shapes)
        assert ours < 0.13 * adamw_bytes(sum(a * b for a, b in shapes))


def test_the_presets_are_those_of_the_page():
    assert set(PRESETS) == {"paper", "energy"}
    assert "`paper` (FFN 128, attention 64, embedding 32)" in PAGE
    assert sorted(PRESETS["paper"].values()) == [32, 64, 128]
