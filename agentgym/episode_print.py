"""Episodes on a terminal: who read and said what, token for token, and what it earned.

What an agent read is dim. What it said is green where its policy is trained, which is where the loss mask is true, and
cyan elsewhere.
"""

import json

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from agentgym.episode import NOT_SAMPLED, Status, Trajectory, Turn, turns_of
from agentgym.episode_json import Dialogue, EpisodeRecord

_STATUS_STYLE = {Status.OK: "green", Status.TRUNCATED: "yellow", Status.FAILED: "red"}


def print_episode(record: EpisodeRecord, console: Console, *, title: str = "") -> None:
    """Print one episode."""
    episode = record.episode
    console.print(Rule(title, style="dim"))
    console.print(_headline(record))
    if episode.error:
        console.print(Text(visible(episode.error), "red"))
    for trajectory, dialogue in zip(episode.trajectories, record.texts, strict=True):
        metrics = episode.agent_metrics.get(trajectory.agent, {})
        console.print(_seat(trajectory, metrics if trajectory.branch == 0 else {}))
        _print_dialogue(trajectory, dialogue, console)
    if not episode.trajectories:
        console.print(Text("nobody answered", "dim"))


def visible(text: str) -> str:
    """Return a text whose control characters are written out: what a model says must not move the cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _headline(record: EpisodeRecord) -> Text:
    episode = record.episode
    line = Text.assemble(
        (episode.env_id, "bold"),
        f" task {episode.task_index}, seed {episode.seed}, group {episode.group_id}, member {episode.member}: ",
        (episode.end_reason.value, _STATUS_STYLE[episode.status]),
    )
    tokens = sum(len(t.tokens) for t in episode.trajectories)
    line.append(f"; {turns_of(episode.trajectories)} turns, {tokens} tokens")
    for name, value in {**episode.metrics, **record.fields}.items():
        line.append(
            f", {name} {value:.3g}" if isinstance(value, float) else f", {name} {visible(str(value))}"
        )
    return line


def _seat(trajectory: Trajectory, metrics: dict[str, float]) -> Text:
    trained = int(trajectory.loss_mask.sum()) if trajectory.trainable else 0
    line = Text.assemble(
        (trajectory.agent, "bold underline"),
        f" played by {trajectory.policy}",
        f", branch {trajectory.branch}" if trajectory.branch else "",
        f": reward {trajectory.reward:g}, {trained} of {len(trajectory.tokens)} tokens trained",
    )
    for name, value in metrics.items():
        line.append(f", {name} {value:g}")
    return line


def _print_dialogue(trajectory: Trajectory, dialogue: Dialogue, console: Console) -> None:
    style = "bold green" if trajectory.trainable else "bold cyan"
    for index, (read, said) in enumerate(dialogue):
        console.print(Text(visible(read), "dim"), end="")
        if index == len(trajectory.turns):
            console.print()
            break
        console.print(Text(visible(said), style), end="")
        console.print(_note(trajectory, trajectory.turns[index]))


def _note(trajectory: Trajectory, turn: Turn) -> Text:
    """Return what there is to say about an answer: its tokens, the weights, its calls, what it earned."""
    parts = [f"{turn.end - turn.start} tokens", turn.finish_reason]
    versions = trajectory.versions[turn.start : turn.end]
    sampled = versions[versions != NOT_SAMPLED]
    if len(sampled):
        low, high = int(sampled.min()), int(sampled.max())
        parts.append(f"weights {low}" if low == high else f"weights {low} to {high}")
    for call in turn.message.get("tool_calls", ()):
        parts.append(f"calls {call['function']['name']}({_arguments(call['function']['arguments'])})")
    note = Text(f"\n    [{visible(', '.join(parts))}]", "magenta")
    if turn.reward or turn.rewards:
        named = ", ".join(f"{name} {value:+g}" for name, value in turn.rewards.items())
        earned = f" {turn.reward:+g}" + (f" ({named})" if named else "")
        note.append(visible(earned), "green" if turn.reward > 0 else "red" if turn.reward < 0 else "yellow")
    return note


def _arguments(text: str) -> str:
    """Return a call's arguments as Python would write them; as they are where they are not a JSON object."""
    try:
        values = json.loads(text)
    except ValueError:
        return text
    if not isinstance(values, dict):
        return text
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
