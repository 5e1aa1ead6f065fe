"""Work out an expression with tools: one agent, four turns.

Task      an expression with small integers, for example "12+7*3=?"; with `questions`, several after one another
Tools     calculate(expression) gives its value; submit(answer) ends the question
Rewards   "success" for each right answer, 1.0 for all; "format" -0.1 for a turn without a tool call
Success   the share of the questions that were answered right
Ends      with the last `submit`; the worker cuts after four turns (more questions need a larger `env.max_turns`)
Scores    success of `noisy` about 0.77, of `expert` 1.0
"""
