"""Every text an agent reads; each turn's message is the board, or the cell that the other player took."""

SYSTEM = {"board": "You are x. Pick 1-9.", "moves": "Pick 1-9."}
"""By what is shown."""
CHOICES = tuple("123456789")
"""The answers, in the order of the cells."""
NO_MOVE = "-"
"""In place of the other player's move, before the first one."""
