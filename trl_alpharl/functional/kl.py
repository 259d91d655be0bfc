"""Estimators of the KL divergence from one sampled token: http://joschu.net/blog/kl-approx.html.

The sample comes from the policy p and is compared with the reference q; `log_ratio` is log q - log p. All are 0 where
the two agree. k1 and k3 have expectation KL(p || q); k2 is biased but its gradient is not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio  # expm1: near 0, exp(x) - 1 - x would lose every digit and its sign


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def per_token_kl(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token.

    Args: logps and ref_logps (any one shape, nats), of the same tokens under policy and reference; estimator, a key of
        KL_ESTIMATORS: k1 (unbiased, may be negative), k2 (low variance), k3 (unbiased, >= 0).
    Returns: that shape, nats; 0 at padding where both hold 0. Nothing is masked.
    Raises: ValueError for an unknown estimator.

    >>> per_token_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0]), "k3")
    tensor([0.0000, 0.3679])
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator: found {estimator!r}, must be one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](ref_logps - logps)
