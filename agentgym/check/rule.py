"""What a rule of `agentgym check` is, and the decorator that adds one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentgym.check.subject import Subject


@dataclass(frozen=True, slots=True)
class Rule:
    """One promise of an environment."""

    name: str
    sentence: str
    """What holds for an environment that keeps it."""
    advice: str
    """What to do where it does not hold."""
    find: Callable[[Subject], Iterable[str]]
    """Returns what is wrong, a sentence each; raises NotApplicable where there is nothing to judge."""


class NotApplicable(Exception):
    """A rule has nothing to say about this environment; the text says why."""


RULES: dict[str, Rule] = {}
"""All rules by name, in the order in which they are tried."""


def rule(
    name: str, sentence: str, advice: str
) -> Callable[[Callable[[Subject], Iterable[str]]], Callable[[Subject], Iterable[str]]]:
    """Add a function as a rule."""

    def add(find: Callable[[Subject], Iterable[str]]) -> Callable[[Subject], Iterable[str]]:
        RULES[name] = Rule(name, sentence, advice, find)
        return find

    return add
