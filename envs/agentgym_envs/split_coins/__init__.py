"""Split ten coins: two agents, player_0 and player_1, who speak at the same time.

Task      in each round both write a short text with a number in it; each then reads the other's words. The
          last round's numbers are the claims
Answer    a text such as "claim 5"; its first integer counts, and the other reads at most 40 characters
Rewards   "coins": the claim, as a share of all coins, where the claims fit together, else 0;
          "format" -0.1 for a last text without a number from 0 to 10, which counts as no claim
Success   1 for both where both claim and the claims fit, else 0
Ends      after the last round (two by default)
Scores    `fair` with `fair` 0.5 each, `random` with `random` 0.18 each
"""
