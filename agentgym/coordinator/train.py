"""`agentgym train`: make the run directory, start everything, run, stop everything, say where the results are."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from agentgym.busy import forget_startup
from agentgym.config import Config
from agentgym.config_file import load_config, save_config
from agentgym.coordinator.clock import AwakeClock
from agentgym.coordinator.launch import Places, latest_checkpoints, launch_all, read_state
from agentgym.coordinator.lineup import Lineups, agents_of
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import FOLDER as EPISODES
from agentgym.coordinator.supervisor import Supervisor, TrainerLost
from agentgym.coordinator.surroundings import Surroundings, check_doors
from agentgym.errors import ConfigError, RunError, StoppedError
from agentgym.log import setup_logging
from agentgym.messages import AgentId
from agentgym.model import check_context, check_model, check_ranks
from agentgym.policy.endpoint import api_key
from agentgym.policy.scripted import load_scripted
from agentgym.policy.template import ChatTokenizer
from agentgym.registry import spec
from agentgym.rewards import check_rewards
from agentgym.tensorboard import TensorBoard
from agentgym.weights import exchange_folder

STOP_SECONDS = 10.0
CHANGEABLE = {
    "run": ("steps",),
    "trainer": ("nproc", "tp", "pp", "ep", "etp", "recompute", "threads"),
    "server": ("bind",),
    "coordinator": ("bind", "keys"),
}
"""By section: the settings of a run that may be others when it is resumed: how long it goes on, and where."""


def train(config: Config, *, resume: bool, console: Console) -> None:
    """Run a training to its end.

    Raises:
        ConfigError: the environment, the model or the run directory is not as the configuration says.
        RunError: the run could not go on; the message names the first cause.
    """
    run_dir = config.run_dir
    if resume and not (run_dir / "config.json").exists():
        raise ConfigError(f"cannot resume: there is no run in {run_dir}; start it without --resume")
    agents = _check(config)
    prepare_run_dir(config, resume=resume)
    with _places(run_dir) as places:
        setup_logging("coordinator", file=places.logs / "coordinator.log")
        training = _Training(config, places, agents, console)
        forget_startup()
        asyncio.run(training.run(resume=resume))
    _summary(run_dir, training.last_metrics, console)


class _Training:
    """What one command does: a coordinator at a time, until one of them reaches the last step."""

    def __init__(self, config: Config, places: Places, agents: Sequence[AgentId], console: Console) -> None:
        self._config = config
        self._places = places
        self._agents = agents
        self._console = console
        self._clock = AwakeClock()
        limits = config.coordinator
        self._supervisor = Supervisor(
            logs=places.logs,
            start_timeout=limits.start_timeout,
            silence_timeout=limits.heartbeat_timeout,
            max_restarts=limits.max_restarts,
            clock=self._clock,
        )
        self._coordinator: Coordinator | None = None
        self._interrupts = 0
        self.last_metrics: dict[str, float] = {}
        """Of the last batch."""

    async def run(self, *, resume: bool) -> None:
        """Run to the last step, again from the last checkpoint when the trainer is lost."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupted, task)
        models = ", ".join(str(self._config.model_of(name)) for name in self._config.policies_to_train)
        self._console.print(
            f"run {self._config.run_dir}: {self._config.env.id}, model {models}", highlight=False
        )
        self._console.print(f"  watch it: tensorboard --logdir {self._places.tensorboard}", highlight=False)
        try:
            while not await self._reached_the_end(resume=resume):
                resume = True
        except asyncio.CancelledError:
            raise StoppedError(
                "stopped at once on request; go on from the last checkpoint with --resume"
            ) from None

    def _interrupted(self, task: asyncio.Task[None]) -> None:
        self._interrupts += 1
        if self._interrupts == 1 and self._coordinator is not None:
            self._coordinator.stop_soon()
        else:
            task.cancel()

    async def _reached_the_end(self, *, resume: bool) -> bool:
        """Run to the last step, or until the trainer is lost; then stop everything all the same."""
        # A run without a checkpoint begins again, with the episodes that it has.
        checkpoints = latest_checkpoints(self._config) if resume else {}
        first = checkpoints.get(self._config.learner)
        state = read_state(first) if first else None
        done = int(str(state["step"])) if state else 0
        if resume:
            self._console.print(
                f"  resumed after step {done} from {first or self._config.model}", highlight=False
            )
        # Step 0 of TensorBoard is the last one of the warm-up.
        board = TensorBoard(
            self._places.tensorboard, first_step=done + 1 - self._config.warmup.steps if resume else None
        )
        reporter = Reporter(
            Schedule(self._config),
            board,
            self._config.tensorboard,
            console=self._console,
            decode=ChatTokenizer(self._config.model).decode,
        )
        try:
            self._coordinator = Coordinator(
                self._config,
                self._places,
                supervisor=self._supervisor,
                reporter=reporter,
                agents=self._agents,
                first_step=done + 1,
                state=state,
                surroundings=Surroundings(clock=self._clock),
            )
            launch_all(self._supervisor, self._config, self._places, resume=checkpoints)
            await self._coordinator.run()
            return True
        except TrainerLost as lost:
            if self._interrupts:
                raise RunError(f"{lost}; go on from the last checkpoint with --resume") from lost
            reporter.say(f"{lost}; everything is stopped, to go on from the last checkpoint")
            return False
        finally:
            self._coordinator = None
            self.last_metrics = reporter.last_episode_metrics
            await asyncio.to_thread(self._supervisor.stop, STOP_SECONDS)
            board.close()


def _check(config: Config) -> list[AgentId]:
    """Look at what the other processes will need, so that what is wrong is said before one is started.

    Returns:
        The agents of the environment; empty where it does not name them beforehand.
    """
    for model in config.served.values():
        check_context(model, check_model(model), config.server.max_model_len)
    for policy in config.policies_to_train:
        check_ranks(config.model_of(policy), config.trainer)
    check_doors(config)
    agents = agents_of(config)
    check_rewards(config, spec(config.env.id))
    Lineups(config, agents).draw(group_id=0, task_index=0, seed=0)
    for name in config.mapped:
        if config.policies[name].kind == "endpoint":
            api_key(name, config.policies[name])
    scripted = [policy.scripted for policy in config.policies.values() if policy.scripted is not None]
    for name in [*scripted, *([config.warmup.policy] if config.warmup.steps else [])]:
        load_scripted(name, config.run.seed, env_spec=spec(config.env.id))
    return agents


def prepare_run_dir(config: Config, *, resume: bool) -> None:
    """Make the run directory, or check that a resumed run has the settings it was started with.

    Raises:
        ConfigError: it has not, the folder holds another run, or it cannot be written.
    """
    run_dir = config.run_dir
    settings = run_dir / "config.json"
    if resume:
        before, now = load_config(settings).model_dump(), config.model_dump()
        for section, names in CHANGEABLE.items():
            before[section].update({name: now[section][name] for name in names})
        changed = [key for key in now if now[key] != before[key]]
        if changed:
            raise ConfigError(
                f"cannot resume {run_dir} with other settings: {', '.join(changed)} differ from {settings}; "
                "only run.steps, the layout of the trainer, and the addresses and keys of the run may change"
            )
    elif settings.exists() or (run_dir / EPISODES).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; go on with --resume, choose another run.name, or remove the folder"
        )
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # what agents say is nobody else's business
        (run_dir / "logs").mkdir(exist_ok=True)
        save_config(config, settings)
    except OSError as error:
        raise ConfigError(
            f"cannot write into the run directory {run_dir}: {error}; choose another run.dir"
        ) from error


@contextlib.contextmanager
def _places(run_dir: Path) -> Iterator[Places]:
    with exchange_folder() as exchange:  # what lies in there goes with it, even after a kill
        sockets = exchange / "sockets"
        sockets.mkdir()
        yield Places(run_dir.absolute(), sockets, exchange)


def _summary(run_dir: Path, metrics: Mapping[str, float], console: Console) -> None:
    success = f", success {metrics['episode/success']:.3f}" if "episode/success" in metrics else ""
    console.print(
        f"done: reward {metrics.get('episode/reward', 0.0):.3f}{success} in the last batch", highlight=False
    )
    console.print(f"  TensorBoard   tensorboard --logdir {run_dir / 'tensorboard'}", highlight=False)
    console.print(f"  checkpoints   {run_dir / 'checkpoints'}", highlight=False)
    console.print(f"  episodes      agentgym show {run_dir}", highlight=False)
    console.print(f"  logs          {run_dir / 'logs'}", highlight=False)
