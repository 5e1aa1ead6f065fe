"""How much memory a process and its descendants use (on Linux; elsewhere nothing is known, and 0 is returned)."""

from pathlib import Path

_PROC = Path("/proc")


def memory_gib(pid: int) -> float:
    """Return the memory of a process and its descendants in GiB; pages that they share count once."""
    return sum(_proportional_kib(each) for each in [pid, *_descendants(pid)]) / 2**20


def _descendants(pid: int) -> list[int]:
    """Return the process ids of all that a process started, and what these started."""
    found = []
    for listing in _PROC.glob(f"{pid}/task/*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except OSError:  # the thread has ended
            continue
        found += [each for child in children for each in (child, *_descendants(child))]
    return found


def _proportional_kib(pid: int) -> int:
    """Return the resident memory of a process, where each page counts by its share in it."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
