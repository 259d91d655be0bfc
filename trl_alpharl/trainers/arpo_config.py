"""`ARPOConfig`: PPO's fields, ARPO's mechanisms, and presets that fill in what a script leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..knobs import ARPOKnobs
from .arpo_presets import DEPENDENT, preset_values
from .ppo_config import PPOConfig, Ranges, check_choices, check_ranges

_PRESET = "None: as the preset says, else "


def _from_preset(default: Any, what: str) -> Any:
    return field(default=None, metadata={"help": f"{what} {_PRESET}{default}."})


@dataclass(repr=False)
class ARPOConfig(ARPOKnobs, PPOConfig):
    """Configuration of `ARPOTrainer`.

    Every field of ARPO, and the few of PPO below, may stay None: the preset then decides, and the object holds what it
    decided. A field that matters only while another is switched on stays None while that one is off; setting it then
    raises ValueError, as every value does that would change nothing.

    Raises as `PPOConfig` does.
    """

    num_mini_batches: int | None = _from_preset(
        1, "Optimizer steps per pass; a preset's number that divides no rollout is lowered."
    )
    kl_coef: float | None = _from_preset(0.05, "Coefficient of the KL penalty in the token rewards.")
    gamma: float | None = _from_preset(1.0, "Discount factor.")
    lam: float | None = _from_preset(0.95, "GAE lambda of the advantages; with lam_end where it starts.")
    adam_beta2: float | None = _from_preset(0.999, "Decay of Adam's second moment.")
    warmup_steps: float | None = _from_preset(0, "Warm-up in optimizer steps; below 1, a share of the run.")

    def __post_init__(self) -> None:
        check_choices(self, ARPOKnobs)
        check_ranges(self, _RANGES)
        given = {knob.name for knob in fields(self) if getattr(self, knob.name) is not None}
        if self.reward_kind is not None and self.preset != "tuned":
            raise ValueError(f"reward_kind is {self.reward_kind!r}, but only preset 'tuned' reads it.")
        values = preset_values(self.preset, self.reward_kind)
        self.chosen_by_preset = set(_OF_PPO) - given
        self._fill_switches(values)
        self._fill_dependents(values)
        super().__post_init__()
        _check_together(self, given)

    def _fill_switches(self, values: dict[str, Any]) -> None:
        defaults = {name: _DEFAULTS[name] for name in _OF_PPO}
        for name, value in {**defaults, **values}.items():
            if name in DEPENDENT or getattr(self, name) is not None:
                continue
            if name == "num_mini_batches":
                value = _largest_divisor(self.per_device_train_batch_size, self.gradient_accumulation_steps, value)
            setattr(self, name, value)

    def _fill_dependents(self, values: dict[str, Any]) -> None:
        if self.reward_kind == "verifiable":
            values = {"reward_sigma_min": 1.0, **values}
        for name, (default, matters, switch) in DEPENDENT.items():
            if not matters(self):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is {getattr(self, name)!r}, which changes nothing: {switch}.")
            elif getattr(self, name) is None:
                setattr(self, name, values.get(name, default))


_OF_PPO = ("num_mini_batches", "kl_coef", "gamma", "lam", "adam_beta2", "warmup_steps")
_DEFAULTS = {knob.name: knob.default for knob in fields(PPOConfig)}


def _largest_divisor(per_device: Any, accumulation: Any, most: int) -> int:
    """The preset's mini-batches, or the most below it into which the rollout of a process divides."""
    if not (isinstance(per_device, int) and isinstance(accumulation, int)):
        return most  # refused a moment later
    return max(number for number in range(1, most + 1) if per_device * accumulation % number == 0)


_NUMBER = (int, float)
_RANGES: Ranges = (
    (
        "reward_sigma_min popart_decay reward_scale_decay kl_stop reuse_surge positive_nll_coef logit_noise norm_noise "
        "shaping_coef entropy_coef entropy_coef_max entropy_rate entropy_kp entropy_ki entropy_start entropy_end "
        "lam_length_scale",
        _NUMBER,
        lambda value: value >= 0,
        "0 or more",
    ),
    ("entropy_coef_min success_threshold", _NUMBER, lambda value: True, "a number"),
    ("reward_scale_decay popart_decay epsilon_mix replay_ratio", _NUMBER, lambda value: 0 <= value < 1, "in [0, 1)"),
    ("lam_end success_target exploration_anneal", _NUMBER, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ("epsilon_top_p", _NUMBER, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("reward_clip rho_max c_max curriculum_width norm_noise_end", _NUMBER, lambda value: value > 0, "above 0"),
    ("replay_size replay_max_age", int, lambda value: value >= 1, "a whole number, at least 1"),
    ("screening", int, lambda value: value >= 0 and value != 1, "0, or a whole number from 2 on"),
)


def _check_together(config: ARPOConfig, given: set[str]) -> None:
    """What several fields must satisfy together. What the preset chose and cannot work here is left to lie still."""
    if config.reuse_surge and config.reuse_surge <= 1:
        raise ValueError(f"reuse_surge is {config.reuse_surge}; it must be above 1, or 0 for none.")
    if config.reuse_surge and config.fp16:
        raise ValueError("reuse_surge: fp16 scales the gradients that it watches; use bf16, or leave it out.")
    for name in ("kl_stop", "reuse_surge"):
        if name in given and getattr(config, name) and config.num_ppo_epochs < 2:
            raise ValueError(f"{name} is {getattr(config, name)}, which changes nothing with num_ppo_epochs 1.")
    if config.lam_length_scale and config.lam_end is not None:
        raise ValueError("lam_length_scale and lam_end are both set; lambda follows one of them.")
    if config.entropy_coef_min is not None and not config.entropy_coef_min < config.entropy_coef_max:
        raise ValueError(
            f"entropy_coef_min is {config.entropy_coef_min}; it must be below entropy_coef_max, here "
            f"{config.entropy_coef_max}."
        )
    if config.norm_noise and config.norm_noise_end > config.norm_noise:
        raise ValueError(
            f"norm_noise_end is {config.norm_noise_end}; it must be at most norm_noise {config.norm_noise}."
        )
    for name in ("logit_noise", "epsilon_mix", "norm_noise"):
        if config.use_vllm and getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}, but vLLM samples from the policy alone; set {name} to 0, or "
                "use_vllm to false."
            )
    if config.screening and config.local_batch_size % (2 * config.screening):
        raise ValueError(
            f"screening is {config.screening}; twice that must divide the rollout of {config.local_batch_size} "
            "completions a process."
        )
    if config.popart and config.vf_coef == 0:
        raise ValueError("popart is on, but vf_coef is 0: there is no critic to train.")
