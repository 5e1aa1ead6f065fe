"""Text views of environments that speak in numbers: board games, grid worlds, card games.

A view is two functions. `describe` writes what an agent sees; `parse` reads an agent's text as an action of the
wrapped environment, and returns None for a text that is not a legal one.

    class                of a                    describe                   parse
    TextWrapper          gymnasium.Env           (env, observation)         (env, text)
    TextAECWrapper       pettingzoo.AECEnv       (env, agent, observation)  (env, agent, text)
    TextParallelWrapper  pettingzoo.ParallelEnv  (env, agent, observation)  (env, agent, text)

The wrapped environment is only asked and stepped, never written to: rewards, ends and infos of the view are kept
here. Rewards of the wrapped environment are named "outcome", those of the rule for illegal answers "illegal".

Illegal answers. One rule for all three, chosen by `illegal`; "turn" is the time between two moves of an agent:

    "retry"    The agent is told, earns nothing and answers again; the wrapped environment does not move. After
               `max_retries` illegal answers in one turn the next one is a forfeit.
    "penalty"  As "retry", but each illegal answer earns `illegal_reward`, and there is no last one: the worker's
               limits end an agent that never learns.
    "forfeit"  The episode is terminated for everyone. The agent earns `illegal_reward`, the others nothing.

What an agent is told names the legal answers where the view has `choices`. Where agents act at once, a step is
played when all answers of it are legal; else everyone answers again, and those whose answers were legal read why.
Each illegal answer counts in `info["metrics"]["illegal"]`.

`success` is given the wrapped environment, the agent where there are several, and the sum of the "outcome" rewards so
far, after every answer; what it returns is `info["success"]`. So a play that the worker cuts is judged by where it
stood. An agent that forfeits has a success of 0.
"""
