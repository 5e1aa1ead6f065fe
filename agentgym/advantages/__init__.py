"""What the answers of an agent were worth, compared with other plays. Pure functions over numpy.

Shapes: B groups of a step, G members of a group, T turns of one agent in one play. R is the sum of a play's rewards,
R_t its reward-to-go from turn t on: R_t = sum over s >= t of discount^(s - t) * r_s.

`menu.estimate` is what a step calls: the advantage that the settings name, for all agents.
"""
