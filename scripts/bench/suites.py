"""Try everything that the task suites have, with scripted players, and count what runs.

    python scripts/bench/suites.py [reasoning_gym] [textarena] [tau2]

reasoning_gym   does the data set's verifier give full marks to the answer that the question was made with?
textarena       does the game begin, and go on for 60 answers? Each in a process of its own, which may hang.
tau2            do the gold actions succeed, and does doing nothing fail?

With nothing else to do, the whole takes about ten minutes on one core, most of them for tau2.
"""

import multiprocessing
import multiprocessing.connection
import os
import sys
from collections import Counter

from agentgym.messages import Message
from agentgym.policy.scripted import ScriptedPolicy, load_scripted
from agentgym.registry import list_envs, make, spec
from agentgym.worker.driver import DRIVERS

SECONDS = 60.0
"""For one game of textarena; loading and generating are slow in some."""
MOST_PLAYERS = 7


def play(
    env: object, kind: str, policies: dict[str, ScriptedPolicy], seed: int, answers: int = 1000
) -> float:
    """Play an episode, at most so many answers; return what the first agent's `info["success"]` was at last."""
    driver = DRIVERS[kind](env)
    state, success = driver.reset(seed), 0.0
    heard: dict[str, list[Message]] = {agent: [] for agent in policies}
    for agent, policy in policies.items():
        policy.reset(agent, seed)
    for _ in range(answers):
        said = {}
        for request in state.requests:
            heard[request.agent] += request.messages
            policy = policies[request.agent]
            said[request.agent] = policy.act(
                heard[request.agent], driver.tools(request.agent), dict(request.info)
            )
            heard[request.agent].append(said[request.agent])
        state = driver.act(said)
        for outcome in state.outcomes:
            if outcome.agent == next(iter(policies)):
                success = float(outcome.info.get("success", success))
        if state.over:
            break
    return success


def reasoning_gym() -> None:
    """Answer one question of each data set with its own answer."""
    wrong = []
    for found in list_envs("reasoning_gym"):
        policy = load_scripted("oracle", 0, env_spec=found)
        if play(make(found.id), "single", {"agent": policy}, seed=1) < 1.0:
            wrong.append(found.id)
    print(f"reasoning_gym: {len(list_envs('reasoning_gym'))} data sets, not full marks: {', '.join(wrong)}")


def textarena() -> None:
    """Play a little of every game, whether it is listed or not."""
    from textarena.envs.registration import ENV_REGISTRY

    from agentgym_envs.textarena.games import PLAYERS

    ids = [one for one in ENV_REGISTRY if not one.endswith(("-raw", "-train"))]
    fork = multiprocessing.get_context("fork")
    outcomes: dict[str, str] = {}
    for one in ids:
        here, there = fork.Pipe(duplex=False)
        child = fork.Process(target=_try_game, args=(one, there), daemon=True)
        child.start()
        outcomes[one] = here.recv() if here.poll(SECONDS) else "hangs, or takes too long"
        child.kill()
        child.join()
    runs = {one for one, outcome in outcomes.items() if outcome == "runs"}
    print(f"textarena: {len(runs)} of {len(ids)} games run, {len(PLAYERS)} are listed")
    print(
        f"  not listed: {sorted(runs - PLAYERS.keys())}; listed and does not: {sorted(PLAYERS.keys() - runs)}"
    )
    for outcome, count in Counter(outcomes.values()).most_common():
        print(f"  {count:4} {outcome}")


def _try_game(name: str, answer: "multiprocessing.connection.Connection") -> None:
    from agentgym_envs.textarena import games
    from agentgym_envs.textarena.env import TextArena
    from agentgym_envs.textarena.policies import FromMenu

    listed = games.PLAYERS.get(name)
    # Games report failed downloads and their progress; nobody reads this process's output.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    outcome = ""
    for players in [listed] if listed else range(1, MOST_PLAYERS + 1):
        try:
            env = TextArena(name, num_players=players)
            play(env, "aec", {agent: FromMenu(seed=0) for agent in env.possible_agents}, seed=1, answers=60)
            return answer.send("runs")
        except Exception as error:  # whatever a game raises is the finding
            outcome = f"{type(error).__name__}: {str(error).strip(chr(10) + '*').strip():.60}"
    return answer.send(outcome)


def tau2() -> None:
    """Replay every task's gold actions, and none of them."""
    from agentgym_envs.tau2.domains import load_tasks
    from agentgym_envs.tau2.policies import Replay

    for found in list_envs("tau2"):
        scores: dict[str, Counter[float]] = {"gold": Counter(), "nothing": Counter()}
        for task_id in load_tasks(found.kwargs["name"], "base"):
            env = make(found.id, task_id=task_id)
            for name, p in (("gold", 0.0), ("nothing", 1.0)):
                seats: dict[str, ScriptedPolicy] = {
                    agent: Replay(seed=0, p=p) for agent in env.possible_agents
                }
                scores[name][play(env, spec(found.id).kind, seats, seed=0)] += 1
        print(f"{found.id}: gold actions {dict(scores['gold'])}, nothing done {dict(scores['nothing'])}")


def main() -> None:
    """Try the suites that are named, or all."""
    suites = {"reasoning_gym": reasoning_gym, "textarena": textarena, "tau2": tau2}
    for name in sys.argv[1:] or suites:
        suites[name]()


if __name__ == "__main__":
    main()
