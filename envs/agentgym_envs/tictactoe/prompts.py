"""Every text an agent reads; the board itself is the message of each turn."""

SYSTEM = "You are x. Pick 1-9."
CHOICES = tuple("123456789")
"""The answers, in the order of the cells."""
