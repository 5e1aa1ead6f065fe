"""A process that writes episodes and consumes them, until it is killed; it says what is on the disk, line by line.

python store_writer.py FOLDER STEP       go on after STEP

lease 12        the episode of lease 12 is acknowledged
step 3          the batch of step 3 may be sent
"""

import asyncio
import sys
from pathlib import Path

from builders import episode_of, sent

from agentgym.coordinator.store import EpisodeStore, StoredGroup

GROUPS, MEMBERS = 2, 2
"""Groups per step, members per group."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fail(error: Exception) -> None:
    say(f"failed {error}")
    sys.exit(1)


async def write(folder: Path, step: int) -> None:
    store = EpisodeStore(folder, failed=fail)
    lease, ready = store.next_lease(), [group.group_id for group in store.go_on(step)]
    group_id = max([10 * lease, *ready]) + 1
    while True:
        group_id += 1
        written = asyncio.Event()
        for member in range(MEMBERS):
            packet = sent(episode_of([1.0] * 20, group=group_id, member=member), lease)

            def acknowledge(lease: int = lease, written: asyncio.Event = written) -> None:
                say(f"lease {lease}")
                written.set()

            store.add(StoredGroup(group_id, group_id, MEMBERS), packet, acknowledge)
            lease += 1
        ready.append(group_id)
        if len(ready) >= GROUPS:
            step += 1
            store.consume(step, ready[:GROUPS], lambda places, step=step: say(f"step {step}"))
            ready = ready[GROUPS:]
            if step % 3 == 0:
                store.forget(step - 3, keep=8, oldest_lease=lease)
        await asyncio.wait_for(written.wait(), 30.0)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
