"""The embedded model: fp32, tied, its ids from the tokenizer, its weights from the seed alone."""

import pytest
import torch

from trl_alpharl.builtin.corpus import stories
from trl_alpharl.builtin.model import build_model
from trl_alpharl.builtin.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(stories(500, seed=0))


def test_ids_type_and_size(tokenizer):
    model = build_model(tokenizer, seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape[0] == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (0, 1, None)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 2_000_000


def test_the_seed_alone_decides_the_weights(tokenizer):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = build_model(tokenizer, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again, other = build_model(tokenizer, seed=5), build_model(tokenizer, seed=6)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
