"""OpenSpiel's games by turns, as PettingZoo environments and as text.

Kuhn and Leduc poker have views of their own; every other game shows what OpenSpiel itself writes and the legal answers.
Rewards are OpenSpiel's, paid when they fall due. Success: 1 for a gain, 0.5 for none, 0 for a loss.
"""
