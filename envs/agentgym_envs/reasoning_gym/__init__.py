"""The data sets of reasoning-gym, one question per episode: `reasoning_gym:basic_arithmetic` and so on.

Task      a question drawn by the episode's seed; same seed, same question
Answer    the text between <answer> and </answer>, or the whole text where there are no tags;
          with `tools=["python"]` the agent may compute first and answers with submit(answer)
Settings  the data set's own, as `env.kwargs`: basic_arithmetic has min_terms, max_terms, max_digits, ...
Rewards   "verifier": what the data set's own verifier gives, 0 to 1 (many give a little for a wrong answer)
Success   1 where the verifier gives its full 1.0, else 0
Info      reset's info has "answer", the one that the data set was made with, for scripted policies

Some verifiers evaluate the answer as Python; `verifier.py` keeps everything but arithmetic away from them.
"""
