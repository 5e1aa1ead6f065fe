"""Questions with their verifiers; answers are a model's text and are trusted with nothing."""

import re
from typing import Any

import numpy as np
import reasoning_gym
import reasoning_gym.factory

from agentgym.errors import ConfigError
from agentgym_envs.global_random import GlobalRandom

EVALUATED = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose verifiers call Python's `eval`, or sympy's parser, which does, on the answer."""

_WORD = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = re.compile(r"Abs|a?(cos|sin|tan)|(cos|sin|tan)h|cot|csc|exp|ln|log|pi|sec|sqrt")

Entry = dict[str, Any]
"""A question as reasoning-gym makes it: "question", "answer", "metadata"."""


class Questions:
    """One data set."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Take the data set's name and its own settings. Raises ConfigError for settings it does not have."""
        self._name = name
        self._settings = settings
        self._random = GlobalRandom()
        known = reasoning_gym.factory.DATASETS[name][1].__dataclass_fields__
        strange = settings.keys() - (known.keys() - {"seed", "size"})
        if strange:
            raise ConfigError(
                f"reasoning_gym:{name} has no setting {', '.join(sorted(strange))}; "
                f"it has {', '.join(sorted(known.keys() - {'seed', 'size'}))}"
            )

    def draw(self, rng: np.random.Generator) -> Entry:
        """Return a question; the data set of one question is made anew from a seed."""
        seed = int(rng.integers(2**31))
        self._random.seed(seed)
        with self._random.borrowed():  # list_functions and pool_matrix draw from the global generators
            self._dataset = reasoning_gym.create_dataset(self._name, seed=seed, size=1, **self._settings)
            entry: Entry = self._dataset[0]
        return entry

    def score(self, answer: str, entry: Entry) -> float:
        """Return what the verifier gives for an answer, 0 to 1; 0 where it fails at a strange one."""
        if self._name in EVALUATED and answer != entry["answer"] and not is_arithmetic(answer):
            return 0.0
        try:
            score = self._dataset.score_answer(answer, entry)
        except Exception:  # the boundary to verifiers that take a well-formed answer for granted
            return 0.0
        return float(np.clip(score, 0.0, 1.0))


def is_arithmetic(text: str) -> bool:
    """Say whether a text can be evaluated as Python without harm: numbers, letters, usual functions."""
    words_known = all(len(word) == 1 or _FUNCTIONS.fullmatch(word) for word in _WORD.findall(text))
    return words_known and "\\" not in text and "__" not in text
