"""The short version of `tests/crash_phases.py`."""

from pathlib import Path

import pytest
from crash_phases import SOME, run_through


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_at_many_moments_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, killed = run_through(folders[0], []), run_through(folders[1], SOME)
    assert (whole.crossed, killed.crossed) == (0, len(SOME))
    assert killed.lost == 0
    assert killed.trained == whole.trained
    assert killed.digest == whole.digest
