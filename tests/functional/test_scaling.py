import json
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_alpharl.functional.scaling import (
    REWARD_SCALERS,
    AverageMoments,
    BatchScaler,
    RobustScaler,
    RunningScaler,
    apply_dynamic_scaling,
    robust_statistics,
)

NAN = float("nan")


def normal(rows: int, seed: int, components: int = 1) -> torch.Tensor:
    return torch.randn(rows, components, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(*scores: float) -> torch.Tensor:
    return torch.tensor(scores, dtype=torch.float64).unsqueeze(1)


class TestRobustStatistics:
    def test_of_a_normal_sample_are_its_mean_and_deviation(self):
        center, scale = robust_statistics(3 + 2 * normal(20_000, 0)[:, 0])
        assert center == pytest.approx(3, abs=0.05)
        assert scale == pytest.approx(2, rel=0.03)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.floats(-100, 100), min_size=2, max_size=40))
    def test_equal_numpy_s_quartiles_where_those_say_something(self, scores):
        q1, q2, q3 = np.percentile(scores, [25, 50, 75])
        far = 40 * (q3 - q1) / 1.349
        deviations = np.array(scores) - q2
        if far > 40 * 2**-23 * np.abs(deviations).mean():
            deviations = np.clip(deviations, -far, far)
        wide = 1.2533 * np.abs(deviations).mean()
        expected = (q2, (q3 - q1) / 1.349)
        if expected[1] <= 0.1 * wide:
            expected = (q2 + deviations.mean(), wide)
        found = robust_statistics(torch.tensor(scores, dtype=torch.float64))
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)

    @pytest.mark.parametrize("successes", [1, 5, 15])
    def test_rare_successes_have_an_iqr_of_zero_and_still_a_scale(self, successes):
        scores = torch.zeros(64)
        scores[:successes] = 1
        center, scale = robust_statistics(scores)
        assert center == pytest.approx(successes / 64)
        assert scale == pytest.approx(1.2533 * successes / 64)

    def test_an_iqr_that_agrees_with_earlier_batches_is_believed(self):
        scores = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1e6, 1e6])  # 20 % outliers
        assert robust_statistics(scores)[1] > 10
        assert robust_statistics(scores, expected=100.0)[1] > 10
        assert robust_statistics(scores, expected=3.0) == (4.5, pytest.approx((6.75 - 2.25) / 1.349))

    def test_rounding_of_equal_scores_is_no_spread(self):
        scores = torch.tensor(
            [0.1, 0.1 + 1e-9, 0.1 - 1e-9, 0.1, 0.1, 0.1, 0.1 + 1e-9, 0.1, 0.1, 1.0], dtype=torch.float64
        )
        center, scale = robust_statistics(scores)
        assert center == pytest.approx(0.19) and scale == pytest.approx(1.2533 * 0.09, rel=1e-3)

    def test_equal_scores_have_no_scale(self):
        assert robust_statistics(torch.full((7,), 0.1)) == (pytest.approx(0.1), 0.0)


class TestRobustScaler:
    @pytest.mark.parametrize("batch", [32, 64, 256])
    def test_outliers_of_a_million_in_five_percent_move_it_by_less_than_a_factor_two(self, batch):
        """The same batches with and without outliers, the share drawn at random: all the way, not at the end only."""
        generator = torch.Generator().manual_seed(batch)
        clean, dirty = RobustScaler(), RobustScaler()
        for step in range(50):
            scores = normal(batch, step)
            hit = torch.rand(batch, 1, generator=generator) < 0.05
            clean.update(scores)
            dirty.update(scores.masked_fill(hit, 1e6))
            assert 0.5 < dirty.spread[0] / clean.spread[0] < 2
            assert abs(dirty.center[0] - clean.center[0]) < clean.spread[0]

    def test_outliers_are_clipped(self):
        scaler = RobustScaler(clip=3.0)
        scores = normal(100, 0)
        scores[:5] = 1e6
        scaler.update(scores)
        scaled = scaler.scale(scores)
        assert scaled[:5].tolist() == [[3.0]] * 5
        assert scaled[5:].abs().median() < 1.5

    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_does_not_see_the_unit_of_the_rewards(self, factor):
        plain, other = RobustScaler(), RobustScaler()
        for step in range(20):
            scores = normal(32, step).pow(3)
            plain.update(scores)
            other.update(scores * factor)
            torch.testing.assert_close(other.scale(scores * factor), plain.scale(scores), rtol=1e-9, atol=1e-9)

    def test_average_and_jump(self):
        """By hand: scores 0, 1, 2 have the median 1 and the IQR 1."""
        scaler = RobustScaler(decay=0.9)
        scaler.update(column(0, 1, 2))
        assert (scaler.center, scaler.spread) == ([1.0], [pytest.approx(1 / 1.349)])
        scaler.update(column(2, 4, 6))  # twice as wide: averaged
        assert scaler.center == [pytest.approx(0.9 * 1 + 0.1 * 4)]
        assert scaler.spread == [pytest.approx((0.9 * 1 + 0.1 * 2) / 1.349)]
        scaler.update(column(0, 10, 20))  # nine times as wide: it starts anew
        assert scaler.center == [10.0] and scaler.spread == [pytest.approx(10 / 1.349)]
        scaler.update(column(3, 3.1, 3.2))  # and when the rewards shrink
        assert scaler.center == [pytest.approx(3.1)] and scaler.spread == [pytest.approx(0.1 / 1.349)]

    def test_min_scale_keeps_zero_one_rewards_as_they_are_wide(self):
        scaler = RobustScaler(min_scale=1.0)
        scaler.update(column(0, 0, 0, 1))
        scaled = scaler.scale(column(0, 1))
        assert float(scaled[1] - scaled[0]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(REWARD_SCALERS))
class TestEveryScaler:
    @pytest.mark.parametrize("constant", [0.0, 0.1, -7.3, 1e6])
    def test_constant_rewards_become_zero(self, name, constant):
        scaler = REWARD_SCALERS[name]()
        for rows in (7, 3, 64):
            scores = torch.full((rows, 1), constant, dtype=torch.float64)
            scaler.update(scores)
            assert scaler.scale(scores).abs().max() == 0

    def test_a_scale_comes_back_after_a_constant_batch(self, name):
        scaler = REWARD_SCALERS[name]()
        for scores in (normal(32, 0), torch.full((32, 1), 0.3, dtype=torch.float64), normal(32, 1)):
            scaler.update(scores)
            assert scaler.scale(scores).isfinite().all()
        assert 0.3 < scaler.scale(normal(32, 1)).std() < 3

    def test_components_do_not_see_each_other(self, name):
        one, both = REWARD_SCALERS[name](), REWARD_SCALERS[name]()
        for step in range(5):
            scores = normal(16, step, 2) * torch.tensor([1.0, 1e4])
            one.update(scores[:, :1])
            both.update(scores)
        assert both.center[0] == one.center[0] and both.spread[0] == one.spread[0]
        assert both.scale(scores)[:, 1].std() < 3

    def test_no_opinion_neither_counts_nor_changes(self, name):
        plain, gaps = REWARD_SCALERS[name](), REWARD_SCALERS[name]()
        scores = normal(8, 0)
        plain.update(scores)
        gaps.update(torch.cat([scores, torch.full((3, 1), NAN, dtype=torch.float64)]))
        gaps.update(torch.full((4, 1), NAN, dtype=torch.float64))
        assert gaps.state_dict() == plain.state_dict()
        scaled = gaps.scale(column(1.0, NAN))
        assert scaled[0].isfinite() and scaled[1].isnan()

    def test_state_is_plain_and_goes_on_bit_for_bit(self, name):
        straight = REWARD_SCALERS[name]()
        for step in range(3):
            straight.update(normal(16, step, 2))
        resumed = REWARD_SCALERS[name]()
        resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        for step in range(3, 6):
            straight.update(normal(16, step, 2))
            resumed.update(normal(16, step, 2))
        assert resumed.state_dict() == straight.state_dict()
        assert torch.equal(resumed.scale(normal(4, 9, 2)), straight.scale(normal(4, 9, 2)))

    def test_plain_numbers(self, name):
        scaler, same = REWARD_SCALERS[name](), REWARD_SCALERS[name]()
        scores = [1.0, None, 2.0, 5.0]
        same.update(column(1.0, NAN, 2.0, 5.0))
        expected = same.scale(column(1.0, 2.0, 5.0)).squeeze(1).tolist()
        found = scaler.of_floats(scores)
        assert found[1] is None and [score for score in found if score is not None] == expected

    def test_a_fault_stays_a_fault_and_moves_nothing(self, name):
        scaler, clean = REWARD_SCALERS[name](), REWARD_SCALERS[name]()
        found = scaler.of_floats([1.0, NAN, 2.0, float("inf")])
        clean.of_floats([1.0, 2.0])
        assert np.isnan(found[1])
        assert scaler.state_dict() == clean.state_dict()


def test_running_statistics_are_those_of_all_scores():
    scaler = RunningScaler()
    batches = [normal(n, n) * n for n in (3, 1, 10)]
    for batch in batches:
        scaler.update(batch)
    everything = torch.cat(batches)[:, 0].tolist()
    assert scaler.center[0] == pytest.approx(statistics.fmean(everything))
    assert scaler.spread[0] == pytest.approx(statistics.pstdev(everything))


def test_batch_statistics_are_the_last_batch_s():
    scaler = BatchScaler(clip=10)
    scaler.update(normal(9, 0) * 50)
    scaler.update(column(1, 3))
    assert scaler.scale(column(1, 3, 4)).squeeze(1).tolist() == [-1, 1, 2]


def test_scaling_by_hand():
    scores = torch.tensor([[1.0, 10.0], [NAN, 40.0]])
    scaled = apply_dynamic_scaling(scores, torch.tensor([0.0, 10.0]), torch.tensor([4.0, 0.5]), clip=5.0, min_scale=2.0)
    torch.testing.assert_close(scaled, torch.tensor([[0.25, 0.0], [NAN, 5.0]]), equal_nan=True)
    assert scaled.dtype == scores.dtype


def test_average_moments_of_equal_batches_are_that_batch_s():
    moments = torch.tensor([5.0, 2.0, 8.0], dtype=torch.float64)
    average = AverageMoments(0.9)
    for _ in range(3):
        torch.testing.assert_close(average.update(moments), moments)
    empty = average.update(torch.zeros(3, dtype=torch.float64))
    assert empty.tolist() == [0.0, pytest.approx(2.0), 2.0]  # nothing counts: nothing moves
    resumed = AverageMoments(0.9)
    resumed.load_state_dict(json.loads(json.dumps(average.state_dict())))
    other = torch.tensor([3.0, 7.0, 4.0], dtype=torch.float64)
    assert torch.equal(resumed.update(other), average.update(other))
    assert average.mean == pytest.approx(0.9 * 2 + 0.1 * 7)
    assert average.variance == pytest.approx(0.9 * 2 + 0.1 * 2)
