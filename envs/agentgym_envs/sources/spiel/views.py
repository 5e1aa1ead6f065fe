"""How OpenSpiel's games are written: Kuhn and Leduc poker in words, all others in OpenSpiel's own."""

import re

from agentgym.messages import AgentId
from agentgym_envs.sources.spiel.game import SpielGame
from agentgym_envs.sources.view import View, chosen, won

KUHN_CARDS = "JQK"
KUHN_MOVES = {"p": "pass", "b": "bet"}
KUHN_PROMPT = "Kuhn poker. Answer pass or bet."
LEDUC_CARDS = "JJQQKK"
LEDUC_MOVES = {"0": "fold", "1": "call", "2": "raise"}
LEDUC_PROMPT = (
    "Leduc poker: two each of J, Q, K; a pair wins, else the higher card. Answer fold, call or raise."
)


def view(env: SpielGame) -> View:
    """Return the view of a game."""
    name = env.game.get_type().short_name
    if name == "kuhn_poker" and env.game.num_players() == 2:
        return View(KUHN_PROMPT, ("pass", "bet"), describe_kuhn, parse, success)
    if name == "leduc_poker" and env.game.num_players() == 2:
        return View(LEDUC_PROMPT, ("fold", "call", "raise"), describe_leduc, parse, success)
    title = env.game.get_type().long_name

    def prompt(agent: AgentId) -> str:
        return (
            f"{title}. You are player {env.possible_agents.index(agent)}. Answer with one of the legal moves."
        )

    return View(prompt, legal, describe, parse, success)


def describe_kuhn(env: SpielGame, agent: AgentId, observation: str) -> str:
    """Return a Kuhn hand, for example "K: pass bet": the player's own card, all moves so far."""
    return (
        f"{KUHN_CARDS[int(observation[0])]}: {' '.join(KUHN_MOVES[move] for move in observation[1:])}".rstrip(
            ": "
        )
    )


def describe_leduc(env: SpielGame, agent: AgentId, observation: str) -> str:
    """Return a Leduc hand: the player's own card, the public one, the pot, all moves so far."""
    found = dict(re.findall(r"\[(\w+): ?([^\]]*)\]", observation))
    lines = [f"card {LEDUC_CARDS[int(found['Private'])]} pot {found['Pot']}"]
    if "Public" in found:
        lines[0] += f" public {LEDUC_CARDS[int(found['Public'])]}"
    for number in ("1", "2"):
        moves = [LEDUC_MOVES[move] for move in found[f"Round{number}"].split()]
        if moves:
            lines.append(f"round {number}: {' '.join(moves)}")
    return "\n".join(lines)


def describe(env: SpielGame, agent: AgentId, observation: str) -> str:
    """Return what OpenSpiel writes and the legal moves."""
    return f"{observation.rstrip()}\nLegal: {', '.join(legal(env, agent))}".lstrip()


def legal(env: SpielGame, agent: AgentId) -> list[str]:
    """Return the legal moves by OpenSpiel's names."""
    return list(env.legal_texts(agent))


def parse(env: SpielGame, agent: AgentId, text: str) -> int | None:
    """Return the number of a legal move."""
    moves = env.legal_texts(agent)
    index = chosen(text, list(moves))
    return None if index is None else list(moves.values())[index]


def success(env: SpielGame, agent: AgentId, outcome: float) -> float:
    """Return 1 for a gain, 0.5 for none, 0 for a loss."""
    return won(outcome)
