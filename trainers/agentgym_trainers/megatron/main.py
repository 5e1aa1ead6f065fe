"""The trainer process.

    python -m agentgym_trainers.megatron.main --config RUN_DIR/config.json --coordinator ADDRESS \
        --policy POLICY --exchange DIR --checkpoints DIR [--name NAME] [--resume CHECKPOINT_DIR] [--parent-pid N]

It says hello when its model is loaded, then asks for batches until it is told to drain. Exit status: 0 after
a drain, 1 after a failure, which it has reported: as a fatal error, but for a batch that is not what its workers
recorded; after that the run goes on from its last checkpoint. It ends by itself when the coordinator is gone.

With `trainer.nproc` > 1 this process becomes torchrun and starts itself that often; rank 0 talks to the coordinator
and passes on what it gets. When one rank fails, torchrun ends the others; when torchrun ends, they do.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.busy import BusyShare, forget_startup, large_imports
from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.errors import AgentGymError, IntegrityError, RunError
from agentgym.keys import load_keys
from agentgym.lifeline import die_with_parent
from agentgym.log import setup_logging
from agentgym.origins import with_recorded
from agentgym.protocol import BatchHeader, BatchRequest, Drain, Error, Hello
from agentgym.wire import PROTOCOL_VERSION, Packet, pack, unpack
from agentgym_trainers.megatron import launch
from agentgym_trainers.megatron.link import Link

if TYPE_CHECKING:
    from agentgym_trainers.megatron.parallel import Channel

logger = logging.getLogger(__name__)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m agentgym_trainers.megatron.main", description="The trainer."
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="resolved settings of the run (JSON or TOML)"
    )
    parser.add_argument("--coordinator", required=True, help="ZeroMQ address of the coordinator")
    parser.add_argument("--policy", required=True, help="the policy to train")
    parser.add_argument("--name", default="trainer", help="how the process is called in logs")
    parser.add_argument("--exchange", type=Path, required=True, help="folder for weight files")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--parent-pid", type=int, help="end when this process is no longer the parent")
    return parser.parse_args(arguments)


def run(config: Config, settings: argparse.Namespace, link: Link | None, busy: BusyShare) -> None:
    """Load the model, then take steps until told to drain. Rank 0 has the link."""
    # megatron-core takes seconds to import and warns about parts that are missing on purpose.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    with large_imports(), launch.without_compiler():
        from agentgym_trainers.megatron import parallel
        from agentgym_trainers.megatron.trainer import Trainer
    timeout = config.coordinator.step_timeout
    with parallel.process_groups(config.trainer, config.run.seed, timeout=timeout):
        channel = parallel.Channel()
        trainer = Trainer(
            config,
            policy=settings.policy,
            exchange=settings.exchange,
            checkpoints=settings.checkpoints,
            resume=settings.resume,
        )
        weights = "" if settings.resume is None else str(trainer.publish())
        if link is not None:
            hello = Hello(
                role="trainer",
                name=settings.name,
                policy=settings.policy,
                protocol=PROTOCOL_VERSION,
                pid=os.getppid() if launch.launched() else os.getpid(),  # the process that was started
                version=trainer.step,
                weights=weights,
            )
            link.send(hello)
        forget_startup()
        while True:
            packet = _next(link, channel, trainer.step + 1)
            match packet.header:
                case BatchHeader() as header:
                    with busy.busy():
                        done = trainer.train(header, packet.arrays)
                    if link is not None:
                        link.send(done)
                        logger.info(
                            "step %d: loss %.4f in %.2f s",
                            done.step,
                            done.metrics["loss"],
                            done.metrics["seconds"],
                        )
                case Drain():
                    return
                case Error(text=text):
                    raise RunError(f"the coordinator refused the trainer: {text}")


def _next(link: Link | None, channel: "Channel", step: int) -> Packet:
    """Return the next batch, drain or error: rank 0 asks for it, the others get it from there."""
    if link is None:
        return unpack(channel.share(None))
    link.send(BatchRequest(step=step))
    packet = link.receive()
    if isinstance(packet.header, BatchHeader):
        packet = replace(packet, arrays=with_recorded(packet.header, packet.arrays))
    if launch.world_size() > 1:
        channel.share([bytes(frame) for frame in pack(packet.header, packet.arrays)])
    return packet


def main(arguments: Sequence[str]) -> int:
    """Run the process and return its exit status."""
    settings = parse_arguments(arguments)
    setup_logging(f"{settings.name}.{launch.rank()}" if launch.launched() else settings.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's, which then drains
    if launch.launched():
        # torchrun's, when another rank has failed: there is some time to end by itself, and for rank 0 to say why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    config = load_config(settings.config)
    if config.trainer.nproc > 1 and not launch.launched():
        command = [sys.executable, "-m", "agentgym_trainers.megatron.main", *arguments]
        as_parent = ["--parent-pid", str(os.getpid())]
        return launch.run_ranks(config.trainer.nproc, [*command, *as_parent], settings.exchange)
    busy = BusyShare()
    link = None if launch.rank() else _connect(settings.coordinator, config, busy)
    try:
        run(config, settings, link, busy)
    except Exception as error:  # the process boundary: whatever it was is reported and ends the process
        logger.exception("the trainer failed")
        # An error of torch's own may only say that another rank has died: then the run goes on from a checkpoint. So it
        # does where a sample was damaged: the ledger is looked through, and what is damaged there is played again.
        if link is not None and (isinstance(error, AgentGymError) or not launch.launched()):
            fatal = not isinstance(error, IntegrityError)
            link.send(Error(text=f"{type(error).__name__}: {error}", fatal=fatal))
        return 1
    finally:
        if link is not None:
            link.close()
    return 0


def _connect(address: str, config: Config, busy: BusyShare) -> Link:
    return Link(
        address,
        heartbeat_interval=config.coordinator.heartbeat_interval,
        busy=busy,
        silence=config.coordinator.abandoned_after,
        keys=load_keys(config.coordinator.keys),
        on_silence=_end_now,
    )


def _end_now(reason: str) -> None:
    """End the process from any thread; what is on the disk is complete at every moment."""
    logger.error("%s; the trainer ends", reason)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
