"""What a run says while it goes: a line per step on the terminal, everything in TensorBoard.

TensorBoard has one clock: step 0 is the last one of the warm-up, whose earlier steps are negative. A resumed run
discards what lies ahead of it there, and nothing else.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape

from agentgym.busy import CpuShare
from agentgym.config import TensorBoardConfig
from agentgym.coordinator.assemble import Assembled
from agentgym.coordinator.evaluations import Evaluation
from agentgym.coordinator.schedule import Schedule, Step
from agentgym.metrics import episode_metrics, render_episode
from agentgym.protocol import StepDone
from agentgym.tensorboard import TensorBoard

_logger = logging.getLogger(__name__)

COLUMNS = (
    ("step", 11), ("success", 7), ("reward", 7), ("age", 5), ("loss", 8), ("entropy", 7),
    ("ep/s", 6), ("tok/s", 6), ("trainer", 7), ("engine", 7), ("left", 6),
)  # fmt: skip
"""Title and width of the columns on the terminal."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Throughput since the step before."""

    seconds: float
    episodes: float
    tokens: float
    trainer_busy: float


class Reporter:
    """Prints and records the progress of a run."""

    def __init__(
        self,
        schedule: Schedule,
        tensorboard: TensorBoard,
        config: TensorBoardConfig,
        *,
        console: Console,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report to `console` and `tensorboard`."""
        self._schedule = schedule
        self._tensorboard = tensorboard
        self._config = config
        self._console = console
        self._decode = decode
        self._clock = clock
        self._cpu = CpuShare()
        self._last = clock()
        self._tokens = 0.0
        self._load_seconds = 0.0
        self._steps_timed = 0
        self._phase_started = clock()
        self._warmup: bool | None = None
        self._printed = 0.0
        self.last_episode_metrics: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print one line, and log it."""
        _logger.warning(text)
        self._console.print(f"[yellow]{time.strftime('%H:%M:%S')}[/] {escape(text)}", highlight=False)

    def loaded(self, seconds: float) -> None:
        """Note how long a policy server took to load weights."""
        self._load_seconds = seconds

    def evaluated(self, evaluation: Evaluation) -> None:
        """Record what the evaluation of a checkpoint found, and print a line."""
        metrics = evaluation.metrics
        self._tensorboard.scalars(metrics, evaluation.step)
        found = []
        if "evaluation/success" in metrics:
            interval = " to ".join(f"{metrics[f'evaluation/success_{end}']:.3f}" for end in ("low", "high"))
            found.append(f"success {metrics['evaluation/success']:.3f} ({interval})")
        if "evaluation/reward" in metrics:
            found.append(f"reward {metrics['evaluation/reward']:.3f}")
        best = "; the best so far" if evaluation.best else ""
        self._console.print(
            f"evaluation of step {evaluation.step}: {', '.join(found) or 'no play counts'}{best}",
            highlight=False,
        )

    def batch_sent(self, step: Step, parts: Mapping[str, Assembled], ratings: Mapping[str, float]) -> None:
        """Record the episodes of a step, and how the policies in them stand to each other."""
        assembled = next(iter(parts.values()))  # the episodes are the same for all
        if step.warmup != self._warmup:
            self._begin_phase(step)
        number = step.number - self._schedule.warmup_steps
        metrics = episode_metrics(assembled.episodes)
        self.last_episode_metrics = metrics
        if step.warmup:
            metrics = {
                f"warmup/{name}": value for name, value in metrics.items() if name.startswith("episode/")
            }
        elif self._config.samples and (number - 1) % self._config.samples_every == 0:
            every = max(1, len(assembled.episodes) // max(1, self._config.samples))  # from different groups
            shown = assembled.episodes[::every][: self._config.samples]
            text = "\n\n---\n\n".join(render_episode(episode, self._decode) for episode in shown)
            self._tensorboard.text("samples/episodes", text, number)
        self._tensorboard.scalars({**metrics, **({} if step.warmup else ratings)}, number)
        if not step.warmup:
            for policy, part in parts.items():
                place = "" if len(parts) == 1 else f"{policy}/"
                self._tensorboard.histogram(f"policy/{place}age_histogram", part.ages, number)

    def step_done(
        self,
        step: Step,
        parts: Mapping[str, Assembled],
        results: Mapping[str, StepDone],
        numbers: dict[str, float],
    ) -> None:
        """Record an optimizer step and print its line; of several policies, the means and the busiest trainer."""
        now = self._clock()
        seconds, self._last = max(1e-9, now - self._last), now
        tokens = numbers.get("system/episodes/tokens", 0.0)
        rates = _Rates(
            seconds=seconds,
            episodes=len(next(iter(parts.values())).episodes) / seconds,
            tokens=(tokens - self._tokens) / seconds,
            trainer_busy=min(1.0, max(r.metrics.get("seconds", 0.0) for r in results.values()) / seconds),
        )
        self._tokens = tokens
        self._steps_timed += 1
        engine = [value for name, value in numbers.items() if name.endswith("/busy") and "/server-" in name]
        values = dict(numbers)
        for policy, header in results.items():
            place = "" if len(results) == 1 else f"{policy}/"
            values |= _trained(step, parts[policy], header, place)
        ages = np.concatenate([part.ages for part in parts.values()])
        number = step.number
        if not step.warmup:
            number -= self._schedule.warmup_steps
            values |= {
                "policy/load_seconds": self._load_seconds,
                "system/episodes_per_second": rates.episodes,
                "system/tokens_per_second": rates.tokens,
                "system/step_seconds": rates.seconds,
                "system/busy/coordinator": self._cpu.read(),
                "system/busy/trainer": rates.trainer_busy,
                "system/busy/engine": sum(engine) / len(engine) if engine else 0.0,
            }
        self._tensorboard.scalars(values, step.number - self._schedule.warmup_steps)
        last = self._schedule.phase_end(step.number)
        # In the warm-up steps are short: a line a second is enough.
        if not step.warmup or step.number == last or now - self._printed > 5.0:
            self._printed = now
            age = float(ages.mean()) if len(ages) else 0.0
            loss, entropy = (
                statistics.mean(result.metrics.get(name, 0.0) for result in results.values())
                for name in ("loss", "entropy")
            )
            busy = sum(engine) / len(engine) if engine else 0.0
            self._row(step, number, rates, age, loss, entropy, busy)

    def _begin_phase(self, step: Step) -> None:
        self._warmup = step.warmup
        self._phase_started, self._steps_timed = self._clock(), 0
        phase = "warm-up: supervised steps on scripted episodes" if step.warmup else "reinforcement learning"
        self._console.print(f"[bold]{phase}[/]", highlight=False)
        self._console.print(" ".join(f"{title:>{width}}" for title, width in COLUMNS), style="bold")

    def _row(
        self, step: Step, number: int, rates: _Rates, age: float, loss: float, entropy: float, engine: float
    ) -> None:
        steps = self._schedule.phase_end(step.number) - (0 if step.warmup else self._schedule.warmup_steps)
        left = (steps - number) * (self._clock() - self._phase_started) / max(1, self._steps_timed)
        metrics = self.last_episode_metrics
        cells = (
            f"{number}/{steps}",
            f"{metrics['episode/success']:.3f}" if "episode/success" in metrics else "-",
            f"{metrics.get('episode/reward', 0.0):.3f}",
            f"{age:.2f}",
            f"{loss:.4f}",
            f"{entropy:.3f}",
            f"{rates.episodes:.0f}",
            f"{rates.tokens:.0f}",
            f"{rates.trainer_busy:.0%}",
            f"{engine:.0%}",
            f"{int(left) // 60}:{int(left) % 60:02d}",
        )
        line = " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
        self._console.out(line, highlight=False)


def _trained(step: Step, part: Assembled, header: StepDone, place: str) -> dict[str, float]:
    """Return what a trainer made of a step, by tag; `place` is the policy's, where there are several."""
    if step.warmup:
        return {f"warmup/{place}{name}": value for name, value in header.metrics.items()}
    metrics, ages = header.metrics, part.ages
    seconds = max(1e-9, metrics.get("seconds", 0.0))
    return {
        **{f"train/{place}{name}": value for name, value in {**metrics, **part.metrics}.items()},
        f"train/{place}tokens_per_second": metrics.get("tokens", 0.0) * step.updates / seconds,
        f"policy/{place}age_mean": float(ages.mean()) if len(ages) else 0.0,
        f"policy/{place}age_max": float(ages.max()) if len(ages) else 0.0,
    }
