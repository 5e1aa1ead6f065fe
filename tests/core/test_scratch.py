import subprocess
import sys
from pathlib import Path

from agentgym.scratch import scratch_folder

OTHER = """
import sys
from pathlib import Path
from agentgym.scratch import scratch_folder
with scratch_folder(sys.argv[1], Path(sys.argv[2])) as folder:
    print(folder, flush=True)
    input()
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one_for_the_same_purpose(tmp_path: Path) -> None:
    left = []
    for purpose in ("server", "other"):
        with subprocess.Popen(
            [sys.executable, "-c", OTHER, purpose, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            left.append(Path(process.stdout.readline().strip()))
            process.kill()
    of_server, of_other = left
    (of_server / "server.log").write_text("it was killed")
    with scratch_folder("server", tmp_path) as mine, scratch_folder("server", tmp_path) as another:
        assert sorted(tmp_path.iterdir()) == sorted([mine, another, of_other])
        assert mine.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [of_other]
