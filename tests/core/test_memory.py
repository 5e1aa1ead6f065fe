import os
import subprocess
import sys

from agentgym.memory import memory_gib

PROGRAM = """
import subprocess, sys
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    child.stdout.readline()
block = bytearray(64 << 20)
block[::4096] = b"x" * len(block[::4096])
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_process_is_its_own_and_that_of_what_it_started() -> None:
    for arguments, mib in (([], 64), ([PROGRAM], 128)):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        used = memory_gib(process.pid) * 1024
        process.communicate()
        assert mib < used < mib + 60, arguments


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory_gib(process.pid) == 0.0
    assert memory_gib(os.getpid()) > 0.0
