"""What a simulated run shows: the reports of its coordinator, with the state of the cluster after each step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.evaluations import Evaluation
from agentgym.coordinator.schedule import Step
from agentgym.protocol import StepDone
from agentgym.simulation.site import Site


@dataclass(frozen=True, slots=True)
class Mark:
    """Sums since the beginning of a run, when a step was done."""

    step: int
    time: float
    training: float
    """Seconds in which the trainer worked."""
    work: float
    """Tokens that the policy servers sampled, with what prompts cost."""
    playing: float
    """Seconds of plays."""
    episodes: float
    """That were finished."""
    tokens: float
    """That were sampled in them."""
    groups: float
    """Open or ready now."""


class Measurements:
    """Takes the place of the terminal and of TensorBoard."""

    def __init__(self, site: Site) -> None:
        """Begin."""
        self._site = site
        self.lines: list[str] = []
        """What people would read."""
        self.masked: dict[int, float] = {}
        """By step: the share of the sampled tokens that were too old to be trained."""
        self.marks: list[Mark] = []

    def say(self, text: str) -> None:
        """See `Report`."""
        self.lines.append(text)

    def loaded(self, seconds: float) -> None:
        """See `Report`."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """See `Report`; a simulated run has none."""

    def batch_sent(self, step: Step, parts: Mapping[str, Assembled], ratings: Mapping[str, float]) -> None:
        """See `Report`; a step that is taken again after a resume counts anew."""
        self.masked[step.number] = max(part.metrics["stale_share"] for part in parts.values())

    def step_done(
        self,
        step: Step,
        parts: Mapping[str, Assembled],
        results: Mapping[str, StepDone],
        numbers: dict[str, float],
    ) -> None:
        """See `Report`."""
        site = self._site
        self.marks.append(
            Mark(
                step=step.number,
                time=site.now(),
                training=site.training.total(),
                work=site.work(),
                playing=site.playing.total(),
                episodes=sum(numbers.get(f"system/episodes/{name}", 0.0) for name in ("ok", "truncated")),
                tokens=numbers.get("system/episodes/tokens", 0.0),
                groups=numbers["system/queue/open_groups"] + numbers["system/queue/ready_groups"],
            )
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cluster does once it is in its stride."""

    seconds_per_step: float
    trainer: float
    """Share of the time in which the trainer works."""
    servers: float
    """Tokens of the policy servers as a share of what they could sample."""
    workers: float
    """Share of the workers' slots in which an episode is played."""
    episodes_per_second: float
    tokens_per_second: float
    age_mean: float
    """Of the trained tokens, in versions."""
    age_max: int
    masked: float
    """Share of the sampled tokens that were too old to be trained."""


def figures(site: Site, measured: Measurements) -> Figures:
    """Return the figures of a run, without its first fifth and its last, where it fills and drains."""
    marks = measured.marks
    edge = len(marks) // 5
    first, last = marks[edge], marks[-1 - edge]
    seconds, config = last.time - first.time, site.config
    steps = range(first.step + 1, last.step + 1)
    ages = sum((ages for (step, _), ages in site.ages.items() if step in steps), Counter[int]())
    speed = site.settings.tokens_per_second_full * config.server.count * len(config.served)
    return Figures(
        seconds_per_step=seconds / len(steps),
        trainer=(last.training - first.training) / seconds / len(config.policies_to_train),
        servers=(last.work - first.work) / seconds / speed,
        workers=(last.playing - first.playing) / seconds / (config.workers.count * config.workers.slots),
        episodes_per_second=(last.episodes - first.episodes) / seconds,
        tokens_per_second=(last.tokens - first.tokens) / seconds,
        age_mean=sum(age * count for age, count in ages.items()) / ages.total(),
        age_max=max(ages),
        masked=sum(measured.masked[number] for number in steps) / len(steps),
    )
