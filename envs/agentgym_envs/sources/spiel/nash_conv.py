"""How far players of a game of OpenSpiel for two are from an equilibrium.

    nash_conv(pyspiel.load_game("kuhn_poker"), probabilities)

asks `probabilities` what the players do at every information set, in the words that they would read there. NashConv is
what a best reply to each player gains over what the policy gets in its place, summed: 0 in an equilibrium, 0.917 for
uniform play in Kuhn poker (Lanctot et al., arXiv:1711.00832). OpenSpiel computes it exactly, from the whole game.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyspiel
from open_spiel.python.algorithms import exploitability
from open_spiel.python.policy import TabularPolicy

from agentgym.messages import AgentId, Message, assistant, system, user
from agentgym_envs.sources.spiel.game import SpielGame
from agentgym_envs.sources.spiel.views import view

Probabilities = Callable[[Sequence[Message], Sequence[str]], Sequence[float]]
"""(conversation, legal answers) to the probability of each; what is missing from 1 goes to illegal answers."""
InformationSet = tuple[str, list[Message], dict[str, int]]
"""OpenSpiel's name of it; what the player has read and said; the legal answers with OpenSpiel's numbers."""


def nash_conv(game: pyspiel.Game, probabilities: Probabilities) -> tuple[float, float]:
    """Return NashConv, and the largest probability of an illegal answer at any information set.

    The probabilities of the legal answers are scaled to a sum of 1, since the game has no others.
    """
    policy = TabularPolicy(game)
    illegal = 0.0
    for name, conversation, answers in information_sets(game):
        shares = np.array(probabilities(conversation, list(answers)), np.float64)
        illegal = max(illegal, 1.0 - float(shares.sum()))
        row = policy.action_probability_array[policy.state_lookup[name]]
        row[:] = 0.0
        row[list(answers.values())] = shares / shares.sum()
    return float(exploitability.nash_conv(game, policy)), illegal


def information_sets(game: pyspiel.Game) -> Iterator[InformationSet]:
    """Yield each information set in which a player must answer, once."""
    env = SpielGame(game)
    look = view(env)
    seen: set[str] = set()

    def visit(state: pyspiel.State, heard: dict[AgentId, list[Message]]) -> Iterator[InformationSet]:
        if state.is_chance_node():
            for action in state.legal_actions():
                yield from visit(state.child(action), heard)
        elif not state.is_terminal():
            env.state = state
            agent = env.possible_agents[state.current_player()]
            read = [*heard[agent], user(look.describe(env, agent, env.observe(agent)))]
            texts = look.choices(env, agent) if callable(look.choices) else look.choices
            answers = {text: move for text in texts if (move := look.parse(env, agent, text)) is not None}
            name = state.information_state_string()
            if name not in seen:
                seen.add(name)
                yield name, read, answers
            for text, move in answers.items():
                yield from visit(state.child(move), {**heard, agent: [*read, assistant(text)]})

    prompts = {a: look.prompt(a) if callable(look.prompt) else look.prompt for a in env.possible_agents}
    yield from visit(game.new_initial_state(), {a: [system(prompt)] for a, prompt in prompts.items()})
