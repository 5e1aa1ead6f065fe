"""What TensorBoard shows: one scheme of tags, the same in every run.

episode/*          of the trained agents in the batch of a step, and agent/<env>/<agent>/* of each alone
fork/*             of those that went on from a turn of an earlier episode, which are in none of the others
opponent/*         of each policy that is not trained, and rating/* of the policies that met
train/*, policy/*  the optimizer step and how old its tokens were
system/*           throughput, busy shares, queues, failures
warmup/*           the supervised steps before reinforcement learning, at negative steps up to 0
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentgym.episode import EndReason, Episode, Trajectory, sampled_tokens
from agentgym.prefix import replayed


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the tags of a batch of episodes, averaged over the plays of agents whose policy is trained."""
    plays: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    whole = []
    for episode in episodes:
        again = replayed(episode)
        if not again:
            whole.append(episode)
        for agent in episode.agents:
            mine = [t for t in episode.trajectories if t.agent == agent]
            numbers = _play(mine, episode.agent_metrics.get(agent, {}))
            trained = any(t.trainable for t in mine)
            if again:
                numbers["replayed_turns"] = float(again)
            opponent = f"opponent/{mine[0].policy.partition('@')[0]}"  # the snapshots of a pool together
            if again:
                places = ["fork"] if trained else []
            else:
                places = [f"agent/{_tag(episode.env_id)}/{agent}", "episode" if trained else opponent]
            for place in places:
                there = plays[place]
                for name, value in numbers.items():
                    there[name].append(value)
    out = {}
    for prefix, names in plays.items():
        for name, values in names.items():
            # A part that was not given is 0; a success that the environment never stated is unknown.
            count = len(values) if name == "success" else len(names["reward"])
            out[f"{prefix}/{name}"] = sum(values) / count
    reasons = Counter(episode.end_reason for episode in whole)
    for reason in EndReason:
        out[f"episode/end/{reason.value}"] = reasons[reason] / max(1, len(whole))
    if whole:
        out["episode/seconds"] = float(np.mean([e.metrics.get("seconds", 0.0) for e in whole]))
    return out


def _play(trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> dict[str, float]:
    turns = [turn for t in trajectories for turn in t.turns]
    values = {
        "reward": sum(turn.reward for turn in turns),
        "turns": float(len(turns)),
        "tokens": float(sum(len(t.tokens) for t in trajectories)),
        "sampled_tokens": float(sum(map(sampled_tokens, trajectories))),
    }
    for turn in turns:
        for name, value in turn.rewards.items():
            values[f"reward/{name}"] = values.get(f"reward/{name}", 0.0) + value
    return {**metrics, **values}  # a metric of the environment hides none of ours


def _tag(env_id: str) -> str:
    return env_id.rpartition("/")[2].replace(":", ".")


def render_episode(episode: Episode, decode: Callable[[Sequence[int]], str]) -> str:
    """Return an episode as Markdown: what each agent read and said, token for token, and what it earned."""
    lines = [
        f"**{episode.env_id}** task {episode.task_index}, group {episode.group_id}, member {episode.member}: "
        f"{episode.end_reason.value}{' - ' + episode.error if episode.error else ''}",
        "",
    ]
    for trajectory in episode.trajectories:
        lines += [f"*{trajectory.agent}* ({trajectory.policy}), reward {trajectory.reward:g}:", ""]
        read = 0
        for turn in trajectory.turns:
            parts = ", ".join(f"{name} {value:+g}" for name, value in turn.rewards.items())
            earned = f" {turn.reward:+g}" + (f" ({parts})" if parts else "") if turn.reward or parts else ""
            lines.append(f"- read {_quote(decode(trajectory.tokens[read : turn.start].tolist()))}")
            said = _quote(decode(trajectory.tokens[turn.start : turn.end].tolist()))
            lines.append(f"- **said** {said}{earned}")
            read = turn.end
        lines.append("")
    return "\n".join(lines)


def _quote(text: str) -> str:
    return "`` " + text.replace("\n", "\\n").replace("``", "''") + " ``"
