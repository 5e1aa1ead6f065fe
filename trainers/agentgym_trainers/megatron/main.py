"""The trainer process.

    python -m agentgym_trainers.megatron.main --config RUN_DIR/config.json --coordinator ADDRESS \
        --policy POLICY --exchange DIR --checkpoints DIR [--name NAME] [--resume CHECKPOINT_DIR] [--parent-pid N]

It says hello when its model is loaded, then asks for batches until it is told to drain. Exit status: 0 after
a drain, 1 after a failure, which it has reported as a fatal error. It ends by itself when the coordinator is
gone.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agentgym.busy import BusyShare, forget_startup
from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.errors import RunError
from agentgym.keys import load_keys
from agentgym.lifeline import die_with_parent
from agentgym.log import setup_logging
from agentgym.protocol import BatchHeader, BatchRequest, Drain, Error, Hello
from agentgym.wire import PROTOCOL_VERSION
from agentgym_trainers.megatron.link import Link

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


def run(config: Config, settings: argparse.Namespace, link: Link, busy: BusyShare) -> None:
    """Load the model, then take steps until told to drain."""
    # megatron-core takes seconds to import and warns about parts that are missing on purpose.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    from agentgym_trainers.megatron import parallel
    from agentgym_trainers.megatron.trainer import Trainer

    with parallel.single_process(config.run.seed):
        trainer = Trainer(
            config,
            policy=settings.policy,
            exchange=settings.exchange,
            checkpoints=settings.checkpoints,
            resume=settings.resume,
        )
        weights = "" if settings.resume is None else str(trainer.publish())
        link.send(
            Hello(
                role="trainer",
                name=settings.name,
                policy=settings.policy,
                protocol=PROTOCOL_VERSION,
                pid=os.getpid(),
                version=trainer.step,
                weights=weights,
            )
        )
        forget_startup()
        while True:
            link.send(BatchRequest(step=trainer.step + 1))
            packet = link.receive()
            match packet.header:
                case BatchHeader() as header:
                    with busy.busy():
                        done = trainer.train(header, packet.arrays)
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


def main(arguments: Sequence[str]) -> int:
    """Run the process and return its exit status."""
    settings = parse_arguments(arguments)
    setup_logging(settings.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's, which then drains
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    config = load_config(settings.config)
    busy = BusyShare()
    link = Link(
        settings.coordinator,
        heartbeat_interval=config.coordinator.heartbeat_interval,
        busy=busy,
        silence=config.coordinator.abandoned_after,
        keys=load_keys(config.coordinator.keys),
        on_silence=_end_now,
    )
    try:
        run(config, settings, link, busy)
    except Exception as error:  # the process boundary: whatever it was is reported and ends the process
        logger.exception("the trainer failed")
        link.send(Error(text=f"{type(error).__name__}: {error}", fatal=True))
        return 1
    finally:
        link.close()
    return 0


def _end_now(reason: str) -> None:
    """End the process from any thread; what is on the disk is complete at every moment."""
    logger.error("%s; the trainer ends", reason)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
