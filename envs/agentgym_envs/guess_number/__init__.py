"""Guess a number: one agent, five turns.

Task      a hidden integer, 1 to 20 by default; each guess is answered with "higher", "lower" or "number?"
Answer    a text with an integer in it; a text without one uses up the turn
Rewards   "success" 1.0 for the number; "consistent" (`consistency_reward`, 0 by default) for each guess
          that all earlier answers still allow
Ends      with the right guess (success 1) or after the last turn (success 0)
Scores    success of `random` 0.23, of `noisy` 0.45, of `expert` 1.0
"""
