from __future__ import annotations

import copy
import pytest
import torch

@pytest.mark.parametrize("kw", [dict(preset="ppo"), dict(preset="tuned"), dict(preset="paper"), dict(reward_kind="verifiable"), dict(reward_kind="drifting", popart=True, screening=2, norm_noise=.01, reuse_surge=2.0, positive_nll_coef=.1, explained_variance_gate=True, advantage_norm="ema", lam_length_scale=.5, entropy_control="pi", replay_ratio=.5)])
def test_smoke(arpo, kw):
    t = arpo(total_episodes=32, **kw)
    t.train()
    for l in t.state.log_history: print(l)
