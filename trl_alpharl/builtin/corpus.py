"""The embedded corpus: little stories of two or three sentences, cheerful, plain or gloomy. Standard library only.

A story is a filled template. The person, the place and the things stay the same through a story; the words that carry
a mood are drawn anew at each slot, so that a story of any mood may hold a word of another.
"""

from __future__ import annotations

import random
import re


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = _words("Anna Clara Emma Grace Julia Maria Nora Rosa")
_MEN = _words("Adam David Felix Henry Jacob Leo Oscar Tom")
_ROLES = _words("baker teacher doctor farmer driver painter sailor gardener singer librarian neighbor captain")
_PLACES = _words("market inn library harbor garden bakery station village museum school farm bridge")
_THINGS = _words("lamp chair coat clock book painting basket boat table hat blanket bicycle")
_FOODS = _words("soup bread cake stew pie cheese salad tea")
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_TIMES = _words("morning afternoon evening")

# slot: (positive, neutral, negative) words
_MOODS = {
    "feeling": (
        _words("happy glad proud delighted grateful thrilled hopeful joyful"),
        _words("ready curious awake hungry thirsty surprised silent serious"),
        _words("sad upset lonely afraid disappointed miserable worried bored"),
    ),
    "character": (
        _words("kind cheerful gentle friendly clever brave generous patient"),
        _words("young old tall busy local new quiet strict"),
        _words("rude angry cruel lazy selfish gloomy careless stubborn"),
    ),
    "quality": (
        _words("lovely wonderful beautiful perfect bright charming splendid elegant"),
        _words("small large plain simple round wooden narrow ordinary"),
        _words("awful terrible ugly dirty broken dull shabby rusty"),
    ),
    "taste": (
        _words("delicious fresh tasty sweet excellent"),
        _words("warm salty thick hot soft"),
        _words("bitter stale burnt sour horrible"),
    ),
    "weather": (
        _words("sunny pleasant glorious mild"),
        _words("cloudy windy cool dry"),
        _words("stormy dreadful freezing grim"),
    ),
    "liked": (
        _words("loved enjoyed admired praised"),
        _words("watched noticed described remembered"),
        _words("hated disliked feared regretted"),
    ),
    "manner": (
        _words("happily warmly gracefully kindly"),
        _words("slowly quietly quickly softly"),
        _words("sadly angrily rudely badly"),
    ),
}
_MOOD_WEIGHTS = (0.3, 0.4, 0.3)
_MOOD_HOLDS = 0.6  # a slot keeps the story's mood this often; otherwise it draws its own

POSITIVE = frozenset(word for moods in _MOODS.values() for word in moods[0])
NEGATIVE = frozenset(word for moods in _MOODS.values() for word in moods[2])

# How a story may open, and how its first sentence may go on. The openings hold no mood: they are the prompts.
_FIRST_SENTENCES = {
    "{name} went to the {place}": (
        " on {day}.",
        " and felt {feeling}.",
        " with a {quality} {thing}.",
        " to meet the {character} {role}.",
    ),
    "{name} bought a {thing} at the {place}": (
        ".",
        " from a {character} {role}.",
        ", and it was {quality}.",
        " and walked home {manner}.",
    ),
    "{name} said the {food} at the {place} was": (
        " {taste}.",
        " {taste} and {taste}.",
        " {taste}, and the {role} agreed {manner}.",
    ),
    "on {day} {name} saw": (
        " a {quality} {thing} at the {place}.",
        " the {character} {role} at the {place}.",
        " a {quality} {place}.",
    ),
    "the {role} gave {name}": (
        " a {quality} {thing}.",
        " some {taste} {food}.",
        " a {thing} and smiled {manner}.",
    ),
    "in the {time} {name} and the {role}": (
        " talked {manner}.",
        " ate some {taste} {food}.",
        " walked to the {quality} {place}.",
        " were {feeling}.",
    ),
    "that {day} the {place} was": (
        " {quality}, and {name} was {feeling}.",
        " full of {character} people, and {name} was there.",
        " open, and {name} {liked} the {food}.",
    ),
}
_LATER_SENTENCES = (
    "{she} felt {feeling}.",
    "{she} felt {feeling} and walked home {manner}.",
    "{she} {liked} the {quality} {thing}.",
    "{she} told the {role} about it {manner}.",
    "the {role} was {character}.",
    "the {role} was {character} and spoke {manner}.",
    "the {food} was {taste}, and everyone {liked} it.",
    "it was a {weather} {time}.",
    "the {place} was {quality} and full of {character} people.",
    "the weather was {weather}, and {she} was {feeling}.",
    "everyone was {feeling}.",
    "what a {weather} day!",
)


class _Story:
    """Words for a template's slots, as a mapping for `str.format_map`; no mood word comes twice in a story."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._mood = self._draw_mood()
        self._used: set[str] = set()
        woman = rng.random() < 0.5
        self._fixed = {
            "name": rng.choice(_WOMEN if woman else _MEN),
            "she": "she" if woman else "he",
            "role": rng.choice(_ROLES),
            "place": rng.choice(_PLACES),
            "thing": rng.choice(_THINGS),
            "food": rng.choice(_FOODS),
            "day": rng.choice(_DAYS),
            "time": rng.choice(_TIMES),
        }

    def _draw_mood(self) -> int:
        return self._rng.choices(range(3), _MOOD_WEIGHTS)[0]

    def __getitem__(self, slot: str) -> str:
        if slot in self._fixed:
            return self._fixed[slot]
        mood = self._mood if self._rng.random() < _MOOD_HOLDS else self._draw_mood()
        word = self._rng.choice([word for word in _MOODS[slot][mood] if word not in self._used])
        self._used.add(word)
        return word


def _sentence(template: str, story: _Story) -> str:
    text = template.format_map(story)
    text = re.sub(r"\ba(?= [aeiou])", "an", text)
    return text[0].upper() + text[1:]


def stories(count: int, seed: int) -> list[str]:
    """`count` texts of two or three sentences; the same seed gives the same texts.

    >>> stories(1, seed=1)
    ['On Thursday David saw a splendid boat at the inn. It was a sunny evening.']
    """
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        story = _Story(rng)
        opening, endings = rng.choice(list(_FIRST_SENTENCES.items()))
        templates = [opening + rng.choice(endings), *rng.sample(_LATER_SENTENCES, rng.choice((1, 2)))]
        texts.append(" ".join(_sentence(template, story) for template in templates))
    return texts


def openings(count: int, seed: int) -> list[str]:
    """`count` distinct beginnings of a first sentence, free of mood words, to be used as prompts."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[_sentence(rng.choice(list(_FIRST_SENTENCES)), _Story(rng))] = None
    return list(found)
