"""Work out an expression with tools: one agent, four turns.

Task      an expression with small integers, for example "12+7*3=?"
Tools     calculate(expression) gives its value; submit(answer) ends the episode
Rewards   "success" 1.0 for the right answer; "format" -0.1 for a turn without a tool call
Ends      with `submit`; the worker cuts after four turns
Scores    success of `noisy` about 0.57, of `expert` 1.0
"""
