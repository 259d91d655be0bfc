"""One draw a row, from the softmax, and when a batch has ended."""

from __future__ import annotations

import pytest
import torch

from trl_alpharl.rollout.drawing import HalfEnded, TokenDraw


def tokens_drawn(scores: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The drawn tokens (rows,): what `generate` takes from the processed scores when it does not sample."""
    found = TokenDraw(temperature, torch.arange(len(scores)))(torch.zeros(len(scores), 1, dtype=torch.long), scores)
    assert found.shape == scores.shape and found.dtype == scores.dtype
    assert torch.equal(found.sum(-1), torch.ones(len(scores)).to(found)) and int((found != 0).sum()) == len(scores)
    return found.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_draws_pass_a_chi_square_test(temperature, dtype):
    """11 words; the statistic has 10 degrees of freedom, and exceeds 35.6 once in ten thousand times."""
    torch.manual_seed(0)
    draws, logits = 40_000, torch.randn(11).to(dtype)
    counts = torch.bincount(tokens_drawn(logits.expand(draws, -1), temperature), minlength=11)
    expected = draws * (logits.double() / temperature).softmax(-1)
    tolerated = 35.6 if dtype == torch.float32 else 80.0  # bf16 rounds a logit divided by the temperature
    assert ((counts - expected).square() / expected).sum() < tolerated


def test_a_draw_is_where_its_number_falls_among_the_running_sums(monkeypatch):
    """900 words, against a sum over all of them."""
    logits = torch.randn(900, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    upto = logits.softmax(-1).cumsum(-1)
    for number in torch.linspace(0, 0.999, 300).tolist():
        if (upto - number).abs().min() < 1e-6:
            continue  # fp32 may put it on either side
        fixed(monkeypatch, number)
        assert int(tokens_drawn(logits.float()[None])) == int((upto <= number).sum())


def test_rows_are_drawn_apart():
    torch.manual_seed(0)
    pairs = tokens_drawn(torch.zeros(8000, 4)).view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    assert ((counts - 250.0).square() / 250.0).sum() < 44.3  # 15 degrees of freedom, once in ten thousand


NEXT_TO_1 = 1.0 - 2.0**-53  # the greatest double that torch.rand can give


def fixed(monkeypatch, number: float) -> None:
    """Let torch.rand give one number."""
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: torch.full(shape, number, dtype=dtype))


@pytest.mark.parametrize("words", [37, 256, 700])
@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 0.75, NEXT_TO_1])
def test_a_token_of_probability_0_is_never_drawn(monkeypatch, number, words):
    """Whether it stands first, last or between; whatever the sum of all probabilities is rounded to."""
    fixed(monkeypatch, number)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(500, words, generator=generator)
    forbidden = torch.bernoulli(torch.full_like(scores, 0.5), generator=generator).bool()
    forbidden[:250, 256:] = True  # where there are so many: whole blocks of nothing
    forbidden[:, [0, -1]] = True
    forbidden[:, 17] = False
    drawn = tokens_drawn(scores.masked_fill(forbidden, -torch.inf))
    assert not forbidden.gather(1, drawn[:, None]).any()
    allowed = torch.where(forbidden, -1, torch.arange(words))
    if number == NEXT_TO_1:
        assert torch.equal(drawn, allowed.amax(1))
    if number == 0.0:
        assert torch.equal(drawn, torch.where(forbidden, words, torch.arange(words)).amin(1))


@pytest.mark.parametrize("place", [0, 30_000, 49_151])
def test_a_rare_token_has_room(monkeypatch, place):
    """Probability 1e-8 among 49152 words: the numbers that fall into its place draw it, those beside it do not."""
    words, rare = 49_152, 1e-8
    probabilities = torch.full((words,), (1.0 - rare) / (words - 1), dtype=torch.float64)
    probabilities[place] = rare
    scores = probabilities.log().float().unsqueeze(0)
    exact = scores.double().softmax(-1)[0]
    start = float(exact[:place].sum())
    for share, expected in ((-0.1, False), (0.1, True), (0.9, True), (1.1, False)):
        number = start + share * rare
        if 0.0 <= number < 1.0:
            fixed(monkeypatch, number)
            assert (int(tokens_drawn(scores)) == place) == expected, share


def test_ties_and_certainty():
    assert tokens_drawn(torch.tensor([[-torch.inf, 3.0, -torch.inf]] * 50)).tolist() == [1] * 50
    assert tokens_drawn(torch.tensor([[0.0, 1e4, 0.0]] * 50)).tolist() == [1] * 50


def test_a_row_of_nan_draws_some_token_and_leaves_the_others_alone():
    """The scoring pass finds out about it and says what is wrong."""
    scores = torch.tensor([[torch.nan] * 3, [-torch.inf, 0.0, -torch.inf]])
    nothing, drawn = tokens_drawn(scores).tolist()
    assert 0 <= nothing < 3 and drawn == 1


def test_fewer_rows_keep_their_numbers():
    scores = torch.zeros(6, 1000)
    torch.manual_seed(0)
    everyone = tokens_drawn(scores)
    torch.manual_seed(0)
    draw = TokenDraw(1.0, torch.arange(6))
    draw.rows = torch.tensor([1, 4])
    assert torch.equal(draw(torch.zeros(2, 1), scores[:2]).argmax(-1), everyone[[1, 4]])


def test_a_batch_ends_once_half_of_its_rows_have():
    ending = HalfEnded(torch.tensor([1, 7]))
    steps = [[5, 5, 5, 5], [5, 1, 5, 5], [5, 0, 5, 5], [7, 0, 5, 5]]
    assert [ending(torch.tensor(tokens)[:, None], None).tolist() for tokens in steps] == [[False] * 4] * 3 + [
        [True] * 4
    ]
    assert ending.ended.tolist() == [True, True, False, False]
