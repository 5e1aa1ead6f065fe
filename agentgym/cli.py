"""The command line: `agentgym train | eval | simulate | check | play | show | replay | fork | list | ...`.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentgym.busy import large_imports
from agentgym.errors import AgentGymError, StoppedError

app = typer.Typer(
    name="agentgym",
    help="Train language-model agents in Gymnasium and PettingZoo environments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="The run's TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, with TOML values.")]
Resolved = Annotated[Path, typer.Option("--config", help="The resolved settings: RUN_DIR/config.json.")]
Connect = Annotated[str, typer.Option("--coordinator", help="The coordinator's ZeroMQ address.")]
EnvId = Annotated[str, typer.Argument(metavar="ID", help='An id, or "module:Class".')]
EnvArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of its constructor, as TOML.")
]
KeyFolder = Annotated[
    Path | None,
    typer.Option("--keys", help="A folder of keys; by default the configuration's coordinator.keys."),
]
Recorded = Annotated[Path, typer.Argument(metavar="FILE|RUN", help="Of `agentgym eval`, or a run directory.")]
Picked = Annotated[int, typer.Option(help="Which one: 1 is the first, -1 the last.")]
ParentPid = Annotated[int | None, typer.Option(help="End when this process is no longer the parent.")]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Train the policy of a configuration in its environment."""
    with large_imports():
        from rich.console import Console

        from agentgym.config_file import load_config
        from agentgym.coordinator.train import train as run

    run(load_config(config, overrides or []), resume=resume, console=Console(soft_wrap=True))


@app.command()
def worker(
    config: Resolved,
    coordinator: Connect,
    keys: KeyFolder = None,
    name: Annotated[str, typer.Option(help="How the worker is called in logs.")] = "worker",
    parent_pid: ParentPid = None,
) -> None:
    """Play episodes for a coordinator; `agentgym train` starts its own workers."""
    with large_imports():
        from agentgym.config_file import load_config
        from agentgym.worker.process import main as run

    run(load_config(config), name=name, coordinator=coordinator, parent_pid=parent_pid, keys=keys)


@app.command()
def serve(
    bind: Annotated[str, typer.Option(help="Where workers reach it: ipc://PATH or tcp://HOST:PORT.")],
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder; by default the configuration's.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="RUN_DIR/config.json, or a TOML file.")] = None,
    policy: Annotated[
        str, typer.Option(help="Which of the configuration's policies; by default the one that is trained.")
    ] = "",
    coordinator: Annotated[str | None, typer.Option(help="The coordinator's ZeroMQ address.")] = None,
    keys: KeyFolder = None,
    name: Annotated[str, typer.Option(help="How the server is called in logs.")] = "server",
    parent_pid: ParentPid = None,
) -> None:
    """Serve a policy with vLLM; `agentgym train` starts its own servers."""
    from agentgym.config import CoordinatorConfig, ServerConfig
    from agentgym.config_file import load_config
    from agentgym.errors import ConfigError
    from agentgym.keys import load_keys
    from agentgym.log import setup_logging
    from agentgym.policy.server import run_server

    setup_logging(name)
    settings = load_config(config) if config is not None else None
    if model is None and settings is None:
        raise ConfigError("nothing to serve: give --model DIR or --config FILE")
    if settings is not None:
        policy = policy or settings.learner
        if model is None and policy not in settings.served:
            raise ConfigError(
                f"there is no policy {policy!r} to serve; served are {', '.join(settings.served)}"
            )
    limits = settings.coordinator if settings is not None else CoordinatorConfig()
    run_server(
        model=model or settings.served[policy],  # type: ignore[union-attr]
        config=settings.server if settings is not None else ServerConfig(),
        policy=policy,
        bind=bind,
        coordinator=coordinator,
        name=name,
        parent_pid=parent_pid,
        heartbeat_interval=limits.heartbeat_interval,
        silence_timeout=limits.abandoned_after,
        keys=load_keys(keys or limits.keys),
    )


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make, or to add clients to.")],
    clients: Annotated[
        list[str] | None, typer.Argument(metavar="[CLIENT]...", help="Names of other machines.")
    ] = None,
) -> None:
    """Make keys for a run that spans several machines; a CLIENT gets a folder to be copied to its machine."""
    from agentgym.keys import make_keys

    for place in make_keys(folder, clients or []):
        typer.echo(f"copy {place} to its machine, and start its workers with --keys")
    typer.echo(f"{folder}: set coordinator.keys to it; who may connect is in {folder / 'allowed'}")


@app.command()
def init_model(
    directory: Annotated[Path, typer.Argument(help="The folder to write.")],
    preset: Annotated[str, typer.Option(help="Which model.")] = "tiny-moe",
    seed: Annotated[int, typer.Option(help="Of the random weights; the same seed gives the same bytes.")] = 1,
) -> None:
    """Write a small random model in the Hugging Face format."""
    from agentgym.tiny_model import init_model as write

    write(directory, preset, seed)
    typer.echo(f"{directory}: a random {preset} model, seed {seed}")


@app.command()
def upcycle(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A dense Llama or Qwen 3 model's folder.")],
    target: Annotated[Path, typer.Argument(metavar="NEW_DIR", help="The folder to write.")],
    experts: Annotated[int, typer.Option(help="Experts of every layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts for each token.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the router's random weights.")] = 1,
) -> None:
    """Write the mixture of experts that a dense model becomes; it computes the same until it is trained."""
    from agentgym.upcycle import upcycle as write

    write(source, target, experts=experts, top_k=top_k, seed=seed)
    typer.echo(
        f"{target}: {experts} experts in every layer, {top_k} for each token, each a copy of {source}'s"
    )


@app.command("list")
def list_environments(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE:]", help="Another library's: 'gymnasium:', 'openspiel:', ..."),
    ] = None,
) -> None:
    """List the environments that are registered, or those of another library."""
    from agentgym.catalog import table
    from agentgym.registry import list_envs, list_sources

    for line in table(list_envs(source)):
        typer.echo(line)
    if source is None:
        typer.echo(f"of other libraries: {' '.join(f'{prefix}:' for prefix in list_sources())}")


@app.command()
def play(
    env_id: EnvId,
    arguments: EnvArguments = None,
    policy: Annotated[
        str,
        typer.Option(help="'human', 'scripted', a scripted policy's name, module:Class, a model's folder."),
    ] = "scripted",
    agent: Annotated[str | None, typer.Option(help="Whom it plays; by default the first agent.")] = None,
    opponent: Annotated[
        str | None, typer.Option(help="Who plays the others; by default the best scripted policy.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the first episode.")] = 0,
) -> None:
    """Play an environment and show what was said."""
    from rich.console import Console

    from agentgym.config_file import parse_arguments
    from agentgym.worker.play import Game
    from agentgym.worker.play import play as run

    game = Game(env_id, parse_arguments(arguments or []), policy, agent, opponent)
    run(game, episodes=episodes, seed=seed, console=Console(soft_wrap=True, highlight=False))


@app.command()
def check(
    env_id: EnvId,
    arguments: EnvArguments = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder: check its chat template and context, too.")
    ] = None,
    max_chars: Annotated[int, typer.Option(min=1, help="Characters that one observation may have.")] = 20_000,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 30.0,
) -> None:
    """Check that an environment keeps its promises; exit status 1 if it breaks one."""
    from rich.console import Console

    from agentgym.check.run import print_check
    from agentgym.check.subject import Options
    from agentgym.config_file import parse_arguments
    from agentgym.model import check_model

    if tokenizer is not None:
        check_model(tokenizer)
    options = Options(
        kwargs=parse_arguments(arguments or []),
        tokenizer=str(tokenizer) if tokenizer is not None else None,
        max_chars=max_chars,
        timeout=timeout,
    )
    if not print_check(env_id, options, Console(soft_wrap=True, highlight=False)):
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WHO", help="Who plays as this policy: a model's folder or a scripted policy."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run whose last checkpoint plays as the trained policy."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many, on fixed tasks.")] = 100,
    group: Annotated[int, typer.Option(min=1, help="Episodes of each task, for pass@k.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Record them; go on where an earlier call ended."),
    ] = None,
) -> None:
    """Evaluate policies: success with its interval, pass@k, rewards, win rates."""
    from rich.console import Console

    from agentgym.config_file import load_config
    from agentgym.evaluation.plan import Plan, with_policies
    from agentgym.evaluation.run import evaluate as run

    # Nothing is trained, so that what only training needs may be otherwise: greedy sampling, groups of one.
    loaded = load_config(config, ["run.steps=0", *(overrides or [])])
    settings = with_policies(loaded, policy or [], checkpoint)
    run(Plan(settings, episodes, group), out=out, console=Console(soft_wrap=True))


@app.command()
def simulate(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps to simulate.")] = 20,
) -> None:
    """Size a cluster: run the coordinator in virtual time, and say what the bottleneck is."""
    from rich.console import Console

    from agentgym.config_file import load_config
    from agentgym.simulation.sizing import size

    size(load_config(config, overrides or []), steps=steps, console=Console(soft_wrap=True, highlight=False))


@app.command()
def show(
    path: Recorded,
    episode: Annotated[int | None, typer.Option(help="Only this one: 1 is the first, -1 the last.")] = None,
) -> None:
    """Show recorded episodes: who said what, what it earned, which tokens were trained."""
    from rich.console import Console

    from agentgym.show import show as run

    run(path, number=episode, console=Console(soft_wrap=True, highlight=False))


@app.command()
def replay(
    path: Recorded,
    episode: Picked = -1,
) -> None:
    """Play a recorded episode again, with its answers; exit status 1 where it comes out differently."""
    from rich.console import Console

    from agentgym.replay.run import replay as run

    if not run(path, number=episode, console=Console(soft_wrap=True, highlight=False)):
        raise typer.Exit(1)


@app.command()
def fork(
    path: Recorded,
    turn: Annotated[int, typer.Option(min=0, help="Answers of each agent that stay as they are.")],
    episode: Picked = -1,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Continuations.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Record them.")] = None,
) -> None:
    """Continue a recorded episode from one of its turns in several ways."""
    from rich.console import Console

    from agentgym.replay.run import fork as run

    console = Console(soft_wrap=True, highlight=False)
    run(path, number=episode, turn=turn, count=count, out=out, console=console)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an expected error is one message on stderr, after the log that explains it.

    Args:
        arguments: instead of those that this process was started with.

    Raises:
        SystemExit: always, with the command's exit status.
    """
    try:
        app(arguments)
    except AgentGymError as error:
        for note in getattr(error, "__notes__", []):
            typer.echo(note, err=True)
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(128 + signal.SIGINT if isinstance(error, StoppedError) else 1)
