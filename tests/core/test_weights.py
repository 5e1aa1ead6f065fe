import subprocess
import sys
from pathlib import Path

from agentgym.weights import exchange_folder, remove_older, weights_file

OTHER = (
    "from agentgym.weights import exchange_folder\nwith exchange_folder() as f: print(f, flush=True); input()"
)


def test_folders_of_killed_runs_are_removed_and_those_in_use_are_not() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as killed,
        subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as alive,
    ):
        of_killed, of_alive = (Path(process.stdout.readline().strip()) for process in (killed, alive))
        killed.kill()
        killed.wait()
        assert of_killed.is_dir()
        with exchange_folder() as mine:
            assert mine.stat().st_mode & 0o777 == 0o700
            assert not of_killed.exists()
            assert of_alive.is_dir()
        assert not mine.exists()
        alive.communicate("\n")
        assert not of_alive.exists()


def test_only_older_versions_are_removed(tmp_path: Path) -> None:
    for version in (2, 9, 10):
        weights_file(tmp_path, version).touch()
    remove_older(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "weights-10.safetensors",
        "weights-9.safetensors",
    ]
