"""Six small tasks for a two-layer language model, one for each way in which rewards are easy or hard to learn from.

Every prompt of a task has the same length and every completion at most `answer_length` tokens, so that no pass needs
padding on the left. Ids: 0 pads, 1 ends a completion, 2..23 are symbols; in the sums 2..11 are the digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

PAD, EOS, VOCABULARY = 0, 1, 24
PLUS, EQUALS = 12, 13
SYMBOLS = VOCABULARY - 2

Ids = Sequence[int]


@dataclass(frozen=True)
class Task:
    """Prompts, what a language model knows of them before the training, and the rewards."""

    name: str
    kind: str  # reward_kind of ARPOConfig
    prompts: list[list[int]]
    answer_length: int  # most tokens of a completion, the end included
    rewards: Callable[[Ids, Ids, float], list[float]]  # prompt, completion, progress -> each reward function's number
    score: Callable[[Ids, Ids], float]  # what is reported: the same scale all run long, no noise
    teach: Callable[[Ids, torch.Generator], list[int]]  # a completion to pre-train on
    # Further reward functions by name, which only a configuration that names or weighs them gets to see.
    helpers: dict[str, Callable[[Ids, Ids], float]] = field(default_factory=dict)


def _draw(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (1,), generator=generator))


def _chance(share: float, generator: torch.Generator) -> bool:
    return float(torch.rand(1, generator=generator)) < share


def _digits(number: int, width: int) -> list[int]:
    """Least digit first, so that a carry goes the way in which one reads."""
    return [2 + number // 10**place % 10 for place in range(width)]


def _sum_prompt(first: int, second: int, width: int) -> list[int]:
    return [*_digits(first, width), PLUS, *_digits(second, width), EQUALS]


def _number(ids: Ids) -> int:
    return sum((token - 2) * 10**place for place, token in enumerate(ids))


def _answer(prompt: Ids, width: int) -> list[int]:
    size = len(prompt) // 2 - 1
    return [*_digits(_number(prompt[:size]) + _number(prompt[size + 1 : -1]), width), EOS]


def _sums(name: str, pairs: list[tuple[int, int]], width: int, known: float) -> Task:
    """Reward 1 for the exact sum; the model starts out having seen right answers in a share `known` of the examples."""
    places = width + 1

    def right(prompt: Ids, completion: Ids) -> float:
        return float(list(completion) == _answer(prompt, places))

    def digits(prompt: Ids, completion: Ids) -> float:
        return sum(said == due for said, due in zip(completion, _answer(prompt, places)[:places])) / places

    def teach(prompt: Ids, generator: torch.Generator) -> list[int]:
        if _chance(known, generator):
            return _answer(prompt, places)
        return [*_digits(_draw(0, 2 * 10**width, generator), places), EOS]

    prompts = [_sum_prompt(first, second, width) for first, second in pairs]
    helpers = {"digits": digits}
    return Task(name, "verifiable", prompts, places + 1, lambda p, c, _: [right(p, c)], right, teach, helpers)


def sparse() -> Task:
    """Exact sums of two numbers below 30."""
    generator = torch.Generator().manual_seed(1)
    pairs = [(_draw(0, 30, generator), _draw(0, 30, generator)) for _ in range(512)]
    return _sums("sparse", pairs, width=2, known=0.7)


def mixed() -> Task:
    """Sums of four levels, from one digit to three: some always solved, some never."""
    generator = torch.Generator().manual_seed(2)
    tops = (5, 15, 40, 1000)
    pairs = [(_draw(0, top, generator), _draw(0, top, generator)) for top in tops for _ in range(128)]
    return _sums("mixed", pairs, width=3, known=0.7)


def _word_scores() -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))


def _letters(seed: int, length: int) -> list[list[int]]:
    drawn = torch.randint(2, VOCABULARY, (512, length), generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()


def _babble(length: int, end: float = 0.1) -> Callable[[Ids, torch.Generator], list[int]]:
    """Random symbols with a random end: the model starts out near the uniform distribution."""

    def teach(prompt: Ids, generator: torch.Generator) -> list[int]:
        ids: list[int] = []
        while len(ids) < length - 1 and not (ids and _chance(end, generator)):
            ids.append(_draw(2, VOCABULARY, generator))
        return [*ids, EOS]

    return teach


def _worth(prompt: Ids, completion: Ids) -> float:
    """The scores of the different words of a completion; half as much for words of the prompt."""
    table = _word_scores()
    words = {token for token in completion if token > EOS}
    return float(sum(table[word] * (0.5 if word in prompt else 1.0) for word in words)) / 2


def dense() -> Task:
    """A score for each word: every completion says something about what is better."""
    return Task("dense", "graded", _letters(4, 4), 10, lambda p, c, _: [_worth(p, c)], _worth, _babble(10))


def scaled() -> Task:
    """The same scores in a unit that grows a hundredfold over the run, 5 % of them spoilt by large errors."""

    def rewards(prompt: Ids, completion: Ids, progress: float) -> list[float]:
        unit = 100.0**progress
        generator = torch.Generator().manual_seed(hash((tuple(prompt), tuple(completion))) % 2**31)
        error = 100 * float(torch.randn(1, generator=generator)) if _chance(0.05, generator) else 0.0
        return [unit * (_worth(prompt, completion) + error)]

    return Task("scaled", "drifting", _letters(4, 4), 10, rewards, _worth, _babble(10))


def _parts(prompt: Ids, completion: Ids) -> list[float]:
    """Four qualities of a completion, each in [0, 1]: high symbols, variety, words of the prompt, a full length."""
    words = [token for token in completion if token > EOS]
    count = max(1, len(words))
    return [
        sum(word > 12 for word in words) / count,
        len(set(words)) / count,
        sum(word in prompt for word in words) / count,
        min(1.0, len(words) / 8),
    ]


UNITS = (1.0, 100.0, 0.01, 10.0)


def multi() -> Task:
    """Four rewards whose units are up to ten thousand apart; what counts is their mean in their own units."""
    return Task(
        "multi",
        "drifting",
        _letters(5, 4),
        10,
        lambda p, c, _: [unit * part for unit, part in zip(UNITS, _parts(p, c))],
        lambda p, c: sum(_parts(p, c)) / 4,
        _babble(10),
    )


def long() -> Task:
    """One reward at the end of 40 tokens: the share of pairs of neighbours that rise by one symbol."""

    def order(prompt: Ids, completion: Ids) -> float:
        words = [token for token in completion if token > EOS]
        rises = sum(after == (before - 1) % SYMBOLS + 2 for before, after in pairwise(words))
        return rises / 39

    return Task("long", "graded", _letters(6, 4), 40, lambda p, c, _: [order(p, c)], order, _babble(40, end=0.02))


TASKS: dict[str, Callable[[], Task]] = {
    "sparse": sparse,
    "dense": dense,
    "scaled": scaled,
    "multi": multi,
    "mixed": mixed,
    "long": long,
}
