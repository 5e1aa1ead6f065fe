"""Prisoner's dilemma, played a few times: two agents, player_0 and player_1, who move at the same time.

Task      in each round both cooperate or defect; each then reads what the other did
Answer    a text with "cooperate" or "defect" in it; who says neither keeps silent, which is to cooperate
Rewards   "points" in each round: 3 each where both cooperate, 1 each where both defect, else 5 for who defects and
          0 for the other; "format" -0.5 for a text that says neither
Success   none: what is best depends on whose reward counts. The metric "cooperated" is the share of an agent's rounds
Ends      after the last round (three by default)
Scores    `tit_for_tat` with itself 9 each, `defector` with itself 3 each, against `tit_for_tat` 7 and 2

To defect pays more whatever the other does, so agents that learn from their own rewards come to defect and earn 1 a
round; those that learn from the sum of both (`algorithm.advantage = "magrpo"`) come to cooperate and earn 3.
"""
