"""`agentgym train`: make the run directory, start everything, run, stop everything, say where the results are."""

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from agentgym.config import Config
from agentgym.config_file import save_config
from agentgym.coordinator.launch import Places, latest_checkpoint, launch_all, read_state
from agentgym.coordinator.lineup import Lineups, agents_of
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.report import Reporter
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import FOLDER as EPISODES
from agentgym.coordinator.supervisor import Supervisor
from agentgym.errors import ConfigError, RunError
from agentgym.log import setup_logging
from agentgym.messages import AgentId
from agentgym.model import check_context, check_model
from agentgym.policy.endpoint import api_key
from agentgym.policy.scripted import load_scripted
from agentgym.policy.template import ChatTokenizer
from agentgym.registry import spec
from agentgym.rewards import check_rewards
from agentgym.tensorboard import TensorBoard
from agentgym.weights import exchange_folder

STOP_SECONDS = 10.0


def train(config: Config, *, resume: bool, console: Console) -> None:
    """Run a training to its end.

    Raises:
        ConfigError: the environment, the model or the run directory is not as the configuration says.
        RunError: the run could not go on; the message names the first cause.
    """
    run_dir = config.run_dir
    if resume and not (run_dir / "config.json").exists():
        raise ConfigError(f"cannot resume: there is no run in {run_dir}; start it without --resume")
    # A run that died before its first checkpoint begins again with the episodes it has.
    checkpoint = (
        latest_checkpoint(run_dir) if resume and (run_dir / "checkpoints" / "latest").exists() else None
    )
    state = read_state(checkpoint) if checkpoint else None
    done = int(str(state["step"])) if state else 0
    agents = _check(config)
    _prepare(config, resume=resume)
    with _places(run_dir) as places:
        setup_logging("coordinator", file=places.logs / "coordinator.log")
        schedule = Schedule(config)
        first_step = done + 1 - config.warmup.steps  # step 0 is the last one of the warm-up
        board = TensorBoard(places.tensorboard, first_step=first_step if resume else None)
        limits = config.coordinator
        supervisor = Supervisor(
            logs=places.logs,
            start_timeout=limits.start_timeout,
            silence_timeout=limits.heartbeat_timeout,
            max_restarts=limits.max_restarts,
        )
        console.print(
            f"run {run_dir}: {config.env.id}, model {config.model}"
            + (f", resumed after step {done} from {checkpoint or config.model}" if resume else ""),
            highlight=False,
        )
        console.print(f"  watch it: tensorboard --logdir {places.tensorboard}", highlight=False)
        reporter = Reporter(
            schedule,
            board,
            config.tensorboard,
            console=console,
            decode=ChatTokenizer(config.model).decode,
        )
        try:
            asyncio.run(_run(config, places, supervisor, reporter, agents, done, state, checkpoint))
        finally:
            supervisor.stop(STOP_SECONDS)
            board.close()
    _summary(run_dir, reporter, console)


async def _run(
    config: Config,
    places: Places,
    supervisor: Supervisor,
    reporter: Reporter,
    agents: Sequence[AgentId],
    done: int,
    state: dict[str, object] | None,
    checkpoint: Path | None,
) -> None:
    coordinator = Coordinator(
        config,
        places,
        supervisor=supervisor,
        reporter=reporter,
        agents=agents,
        first_step=done + 1,
        state=state,
    )
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(coordinator.run())
    signals = 0

    def interrupted() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            coordinator.stop_soon()
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    launch_all(supervisor, config, places, resume=checkpoint)
    try:
        await task
    except asyncio.CancelledError:
        raise RunError("stopped at once on request; go on from the last checkpoint with --resume") from None


def _check(config: Config) -> list[AgentId]:
    """Look at what the other processes will need, so that what is wrong is said before one is started.

    Returns:
        The agents of the environment; empty where it does not name them beforehand.
    """
    for model in config.served.values():
        check_context(model, check_model(model), config.server.max_model_len)
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


def _prepare(config: Config, *, resume: bool) -> None:
    """Make the run directory, or check that a resumed run has the settings it was started with."""
    run_dir = config.run_dir
    settings = run_dir / "config.json"
    if resume:
        before = json.loads(settings.read_text())
        now = json.loads(config.model_dump_json())
        before["run"]["steps"] = now["run"]["steps"]  # a finished run may be given more steps
        changed = [key for key in now if now[key] != before.get(key)]
        if changed:
            raise ConfigError(
                f"cannot resume {run_dir} with other settings: {', '.join(changed)} differ from {settings}; "
                "only run.steps may change"
            )
    elif settings.exists() or (run_dir / EPISODES).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; go on with --resume, choose another run.name, or remove the folder"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        save_config(config, settings)
    except OSError as error:
        raise ConfigError(
            f"cannot write into the run directory {run_dir}: {error}; choose another run.dir"
        ) from error


@contextlib.contextmanager
def _places(run_dir: Path) -> Iterator[Places]:
    sockets = Path(tempfile.mkdtemp(prefix="agentgym-"))
    try:
        with exchange_folder() as exchange:
            yield Places(run_dir.absolute(), sockets, exchange)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _summary(run_dir: Path, reporter: Reporter, console: Console) -> None:
    metrics = reporter.last_episode_metrics
    success = f", success {metrics['episode/success']:.3f}" if "episode/success" in metrics else ""
    console.print(
        f"done: reward {metrics.get('episode/reward', 0.0):.3f}{success} in the last batch", highlight=False
    )
    console.print(f"  TensorBoard   tensorboard --logdir {run_dir / 'tensorboard'}", highlight=False)
    console.print(f"  checkpoints   {run_dir / 'checkpoints'}", highlight=False)
    console.print(f"  episodes      agentgym show {run_dir}", highlight=False)
    console.print(f"  logs          {run_dir / 'logs'}", highlight=False)
