"""Every text an agent reads."""


def system_prompt(rounds: int) -> str:
    """Return the task."""
    return f"{rounds} rounds. Say cooperate or defect."


def first() -> str:
    """Return what opens the first round."""
    return "?"
