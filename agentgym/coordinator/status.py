"""How a run stands: its numbers, and who is waited for."""

from collections import Counter
from collections.abc import Sequence

from agentgym.coordinator.dispatcher import Dispatcher
from agentgym.coordinator.peers import Peers
from agentgym.coordinator.supervisor import Supervisor
from agentgym.episode import NOT_SAMPLED, Episode, Trajectory


def run_numbers(dispatcher: Dispatcher, supervisor: Supervisor) -> dict[str, float]:
    """Return the numbers of the system as it is now, by TensorBoard tag."""
    leases, groups = dispatcher.leases, dispatcher.groups
    numbers = {
        "system/queue/waiting": float(leases.waiting),
        "system/queue/playing": float(leases.playing),
        "system/queue/open_groups": float(groups.open),
        "system/queue/ready_groups": float(groups.ready),
        "system/concurrency/limit": float(dispatcher.concurrency.limit),
        "system/restarts": float(supervisor.restarts),
    }
    for prefix, counts in (
        ("leases", leases.counts),
        ("groups", groups.counts),
        ("episodes", dispatcher.counts),
    ):
        for name, count in counts.items():
            numbers[f"system/{prefix}/{name}"] = float(count)
    for child in supervisor.children.values():
        for name, value in child.stats.items():
            numbers[f"system/{child.name}/{name}"] = value
    return numbers


def waiting_for(
    peers: Peers, dispatcher: Dispatcher, supervisor: Supervisor, *, step: int | None, policies: Sequence[str]
) -> str:
    """Say who is waited for, and when it was last heard; the trainers of `policies` work on `step`, if one does."""
    there = {trainer.name for trainer in peers.trainers.values()}
    trainers = [name for name, child in supervisor.children.items() if child.role == "trainer"]
    missing = [name for name in trainers if name not in there] if there else ["trainer"]
    if missing:
        return f"{', '.join(missing)} has not said hello ({supervisor.last_seen(missing)})"
    if step is not None:
        working = [peers.trainers[policy].name for policy in policies]
        return f"{', '.join(working)} works on step {step} ({supervisor.last_seen(working)})"
    workers = [name for name, child in supervisor.children.items() if child.role == "worker"]
    if not peers.workers:
        return f"no worker is connected ({supervisor.last_seen(workers)})"
    loading = [server.name for server in peers.servers.values() if server.loading is not None]
    if loading:
        return f"{', '.join(loading)} is loading weights ({supervisor.last_seen(loading)})"
    leases, groups = dispatcher.leases, dispatcher.groups
    if not peers.servers and not leases.playing:
        servers = [name for name, child in supervisor.children.items() if child.role == "server"]
        return f"no policy server is ready ({supervisor.last_seen(servers)})"
    return (
        f"{leases.playing} episodes are being played and {leases.waiting} wait, {groups.open} groups are open, "
        f"{groups.ready} ready; last failure: {dispatcher.last_error or 'none'} ({supervisor.last_seen(workers)})"
    )


def nobody_answered(step: int, policy: str, episodes: Sequence[Episode]) -> str:
    """Say why there is nothing to learn in a step whose episodes hold no answer of a policy that is trained."""
    reasons = Counter(episode.end_reason.value for episode in episodes)
    ends = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    return (
        f"no agent of {policy!r} gave an answer in the {len(episodes)} episodes of step {step}; they ended by {ends}. "
        "Does what an agent reads first fit into server.max_model_len and env.max_tokens?"
    )


def too_old(
    step: int, policy: str, trajectories: Sequence[Trajectory], *, tries: int, usable: tuple[int, int]
) -> str:
    """Say that a step gets no tokens of the versions that are `usable`, but of which, in these trajectories."""
    versions = {int(version) for t in trajectories for version in t.versions[t.loss_mask]} - {NOT_SAMPLED}
    found = (
        f"{min(versions)} to {max(versions)}" if len(versions) > 1 else f"{min(versions, default='unknown')}"
    )
    return (
        f"nothing can be learned in step {step} from {tries} batches one after another: the tokens of {policy!r} in "
        f"the last one are of version {found}, the step trains versions {usable[0]} to {usable[1]}. "
        "Do its policy servers answer with the weights that they say they have loaded?"
    )
