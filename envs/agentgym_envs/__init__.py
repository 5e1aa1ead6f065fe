"""The environments that are shipped with agentgym, one folder each.

    agentgym/GuessNumber-v0   one agent, five turns: find a hidden number from "higher" and "lower"
    agentgym/Calculator-v0    one agent with tools: work out an expression, submit the answer
    agentgym/TicTacToe-v0     two agents by turns: PettingZoo's tic-tac-toe, as text
    agentgym/SplitCoins-v0    two agents at once: talk, then claim a share of ten coins
    agentgym/PrisonersDilemma-v0   two agents at once: cooperate or defect, a few times in a row

A folder holds the rules (pure functions), the prompts (every text an agent reads), the environment and its
scripted policies; the docstring of its `__init__` is the environment's card. Every text is printable ASCII.
"""

from agentgym.registry import register


def register_envs() -> None:
    """Register all of them; the entry point of the group "agentgym.envs" calls this."""
    register(
        "agentgym/GuessNumber-v0",
        "agentgym_envs.guess_number.env:GuessNumber",
        kind="single",
        scripted=_policies("guess_number", random="RandomGuess", noisy="NoisyGuess", expert="Bisection"),
        isolation="inline",
    )
    register(
        "agentgym/Calculator-v0",
        "agentgym_envs.calculator.env:Calculator",
        kind="single",
        max_turns=4,
        scripted=_policies("calculator", noisy="NoisyCalculator", expert="CalculatorExpert"),
        isolation="shared",
    )
    register(
        "agentgym/TicTacToe-v0",
        "agentgym_envs.tictactoe.env:TicTacToe",
        kind="aec",
        scripted=_policies("tictactoe", random="RandomMove", noisy="NoisyMove", expert="Minimax"),
        isolation="inline",
    )
    register(
        "agentgym/SplitCoins-v0",
        "agentgym_envs.split_coins.env:SplitCoins",
        kind="parallel",
        scripted=_policies("split_coins", random="RandomClaim", fair="FairClaim", expert="FairClaim"),
        isolation="inline",
    )
    register(
        "agentgym/PrisonersDilemma-v0",
        "agentgym_envs.prisoners_dilemma.env:PrisonersDilemma",
        kind="parallel",
        scripted={
            "random": "agentgym.policy.scripted:RandomLegal",
            **_policies("prisoners_dilemma", tit_for_tat="TitForTat", defector="Defector"),
        },
        isolation="inline",
    )


def _policies(folder: str, **classes: str) -> dict[str, str]:
    return {name: f"agentgym_envs.{folder}.policies:{cls}" for name, cls in classes.items()}
