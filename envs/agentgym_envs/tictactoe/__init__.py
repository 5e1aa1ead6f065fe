"""Tic-tac-toe: two agents, player_1 and player_2, by turns; PettingZoo's game as text.

View      shown = "board": nine symbols, row by row, from the mover's side: "x" mine, "o" theirs, "." free;
          shown = "moves": the cell that the other player took, "-" before the first move, so that the conversation is
          the game; a turn has 6 tokens of the tiny model instead of 14
Answer    one digit, the cell: 1 2 3 / 4 5 6 / 7 8 9; spaces around it do not matter
Rewards   "outcome" +1 win, -1 loss, 0 draw, to both agents' last answers;
          an illegal text is a forfeit: "illegal" -1 to the mover, 0 to the other
Success   1 win, 0.5 draw, 0 loss; after a forfeit 0 for the mover and 0.5 (not contested) for the other
Mask      "action_mask" over the digits "1" to "9", for scripted policies
Scores    `random` first against `random` wins 0.585, draws 0.127; `expert` never loses
"""
