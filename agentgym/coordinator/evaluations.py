"""A run's own evaluations: its checkpoints on fixed tasks, against fixed opponents, beside the training.

Each is `agentgym eval` in a process of its own, with a policy server of its own that holds the checkpoint's weights, so
that neither the training nor its weight updates are waited for. One runs at a time; what falls due meanwhile waits, and
of those that wait only the newest is played.

    RUN/evaluations/config.json        the settings they are played with
    RUN/evaluations/step-000025.jsonl  the episodes; `agentgym show` reads them
    RUN/best/                          the model folder of the best one so far, and evaluation.json, which says why
"""

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym import lifeline
from agentgym.config import Config
from agentgym.config_file import save_config
from agentgym.coordinator.launch import environment
from agentgym.episode_json import read_episodes
from agentgym.errors import AgentGymError
from agentgym.evaluation.stats import wilson
from agentgym.evaluation.summary import scores

LOOK_SECONDS = 0.5
"""Between two readings of the clock, which takes the time in which nobody reads it for a standstill."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    step: int
    """Of reinforcement learning, whose checkpoint was played."""
    metrics: dict[str, float]
    """By TensorBoard tag."""
    best: bool
    """Whether no earlier one was as good."""


class Evaluations:
    """Plays the checkpoints of a run that are due; belongs to a running event loop."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        done: Callable[[Evaluation], None],
        failed: Callable[[str], None],
    ) -> None:
        """Play none yet; `done` and `failed` are called on the loop, with what was found or what went wrong."""
        self._config = config
        self._folder = run_dir / "evaluations"
        self._best = run_dir / "best"
        self._done = done
        self._failed = failed
        self._next: tuple[int, Mapping[str, Path]] | None = None
        self._task: asyncio.Task[None] | None = None
        for kept in self._folder.glob("step-*/"):  # of a coordinator that was killed while it was played
            shutil.rmtree(kept)

    def start(self, step: int, models: Mapping[str, Path]) -> None:
        """Play a checkpoint, given by the model folders of the policies, after what is played now."""
        self._next = (step, models)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._play_all())

    async def close(self, timeout: float, clock: Callable[[], float]) -> None:
        """Wait for those that were started; after `timeout` seconds by the clock, which is read often, give them up."""
        if self._task is None:
            return
        given_up = clock() + timeout
        while not self._task.done() and (left := given_up - clock()) > 0.0:
            await asyncio.wait([self._task], timeout=min(left, LOOK_SECONDS))
        if not self._task.done():
            if timeout:
                self._failed(f"the last evaluation did not end within {timeout:g} s and is given up")
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _play_all(self) -> None:
        while self._next is not None:
            (step, models), self._next = self._next, None
            try:
                await self._play(step, models)
            except (AgentGymError, OSError) as error:  # the training goes on without it
                self._failed(f"the evaluation of step {step} failed: {error}")

    async def _play(self, step: int, models: Mapping[str, Path]) -> None:
        settings, out = self._folder / "config.json", self._folder / f"step-{step:06d}.jsonl"
        self._folder.mkdir(exist_ok=True)
        save_config(evaluated(self._config), settings)
        out.unlink(missing_ok=True)  # of a run that was left when it went on from before it
        # The trainer may remove the checkpoint while it is played.
        kept = self._folder / f"step-{step:06d}"
        shutil.rmtree(kept, ignore_errors=True)
        try:
            for policy, model in models.items():
                await asyncio.to_thread(shutil.copytree, model, kept / policy)
            command = [
                *(sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())),
                *(sys.executable, "-m", "agentgym", "eval", str(settings), "--out", str(out)),
                *("--episodes", str(self._config.evaluation.episodes)),
            ]
            for policy in models:
                command += ["--policy", f"{policy}={kept / policy}"]
            log = self._folder / f"step-{step:06d}.log"
            status = await _run(command, log, environment(self._config.server.threads))
            if status:
                _logger.error("evaluation of step %d: exit status %d, see %s", step, status, log)
                self._failed(f"the evaluation of step {step} ended with status {status}; see {log}")
                return
            self._done(await asyncio.to_thread(self._judge, step, out, kept))
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    def _judge(self, step: int, out: Path, kept: Path) -> Evaluation:
        metrics = self._metrics(out)
        return Evaluation(step, metrics, self._is_best(step, metrics, kept))

    def _metrics(self, out: Path) -> dict[str, float]:
        """Return the means over the plays of the policies in training; of several policies, each one's, too."""
        found = scores([record.episode for record in read_episodes(out).records])
        values: dict[str, list[float]] = {}
        for (policy, _), score in found.items():
            if policy in self._config.policies_to_train:
                for name, given in (("success", score.successes), ("reward", score.rewards)):
                    tags = [f"evaluation/{name}"]
                    if len(self._config.policies_to_train) > 1:
                        tags.append(f"evaluation/{policy}/{name}")
                    for tag in tags:
                        values.setdefault(tag, []).extend(given)
        metrics = {tag: sum(given) / len(given) for tag, given in values.items() if given}
        if "evaluation/success" in metrics:
            given = values["evaluation/success"]
            low, high = wilson(metrics["evaluation/success"], len(given))
            metrics |= {"evaluation/success_low": low, "evaluation/success_high": high}
        return metrics

    def _is_best(self, step: int, metrics: Mapping[str, float], kept: Path) -> bool:
        """Keep the model of an evaluation that is better than the best one; return whether it is."""
        tag = "evaluation/success" if "evaluation/success" in metrics else "evaluation/reward"
        reason = self._best / "evaluation.json"
        before = json.loads(reason.read_text()) if reason.exists() else {}
        if tag not in metrics or metrics[tag] <= before.get(tag, float("-inf")):
            return False
        policies = self._config.policies_to_train
        fresh = kept if len(policies) > 1 else kept / policies[0]  # as `Config.place_of` has it
        (fresh / reason.name).write_text(json.dumps({"step": step, **metrics}, indent=2) + "\n")
        shutil.rmtree(self._best, ignore_errors=True)
        fresh.rename(self._best)
        return True


def evaluated(config: Config) -> Config:
    """Return the settings of an evaluation within a run: who plays whom may be other than in the training."""
    mapping = config.evaluation.policy_mapping
    if not mapping:
        return config
    return config.model_copy(update={"policy_mapping": mapping, "policy_mapping_fn": None})


async def _run(command: list[str], log: Path, variables: Mapping[str, str]) -> int:
    """Run a command, with a log of what it prints; it is killed when nobody waits for it any more."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
