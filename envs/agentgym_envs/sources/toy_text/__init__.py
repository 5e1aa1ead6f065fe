"""Views of gymnasium's toy-text environments, written from their state: what they render as text loses it.

The agent alone, one word a turn. "frozen" is the id without version.

    FrozenLake, FrozenLake8x8  reach the goal; +1 there. Success: there.
    CliffWalking(Slippery)     reach the goal; -1 a step, -100 for the cliff. Success: there.
    Taxi                       fetch a passenger; -1 a step, -10 for a wrong pickup or dropoff, +20. Success: delivered.
    Blackjack                  +1 win, 0 draw, -1 loss (a natural may pay 1.5). Success: 1, 0.5, 0.
"""
