"""Tokens per second through a policy server, against the same workload on vLLM's AsyncLLM in its own process.

    python scripts/bench/policy_plane.py

A tiny mixture of experts plays 128 episodes at once, 8 turns of 16 tokens each, with log-probabilities and routes.
Runs alternate between the two ways on the same engine; the ratio is the median of the paired ratios. What the
number leaves out: environments, tokenization and the trainer.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from agentgym.config import ServerConfig
from agentgym.policy.client import PolicyClient, Sampling
from agentgym.tiny_model import VOCABULARY, init_model

TURNS, TOKENS, NEW, FIRST = 8, 16, 8, 32
"""Turns of an episode; tokens of an answer, of an observation, and of the first prompt."""

Ask = Callable[[list[int], int], Awaitable[list[int]]]
"""(prompt, routes_start) -> sampled tokens."""


async def workload(ask: Ask, episodes: int) -> float:
    """Play the episodes and return tokens per second."""

    async def episode(number: int) -> None:
        rng = random.Random(
            f"{number} {time.time_ns()}"
        )  # new prompts: no prefix is cached from the last run
        prompt = [rng.randrange(9, len(VOCABULARY)) for _ in range(FIRST)]
        known = 0
        for _ in range(TURNS):
            answer = await ask(prompt, known)
            known = len(prompt) + len(answer) - 1
            prompt += answer
            prompt += [rng.randrange(9, len(VOCABULARY)) for _ in range(NEW)]

    start = time.perf_counter()
    await asyncio.gather(*(episode(number) for number in range(episodes)))
    return episodes * TURNS * TOKENS / (time.perf_counter() - start)


async def serve(model: Path, address: str, episodes: int) -> None:
    """Be the server's process; each line on standard input asks for one in-process run."""
    from vllm.inputs import TokensPrompt

    from agentgym.policy.engine import Engine
    from agentgym.policy.server import PolicyServer

    engine = await Engine.start(model, ServerConfig())
    server = PolicyServer(engine, address)
    numbers = iter(range(10**9))

    async def ask(prompt: list[int], routes_start: int) -> list[int]:
        params = engine.sampling_params(Sampling(max_tokens=TOKENS), routes_start)
        request = TokensPrompt(prompt_token_ids=prompt)
        async for output in engine.llm.generate(request, params, f"direct-{next(numbers)}"):
            result = output.outputs[0]
        return list(result.token_ids)

    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await workload(ask, episodes)), flush=True)
    server.close()
    engine.close()


async def measure(address: str, in_process: Callable[[], float], runs: int, episodes: int) -> None:
    """Alternate the two ways and print the table."""
    client = PolicyClient([address])

    async def ask(prompt: list[int], routes_start: int) -> list[int]:
        completion = await client.complete(
            prompt, Sampling(max_tokens=TOKENS), routes_start=routes_start, timeout=300.0
        )
        return [int(token) for token in completion.tokens]

    pairs = []
    print(f"{'run':>6} {'AsyncLLM tok/s':>15} {'server tok/s':>13} {'ratio':>6}")
    for run in range(runs + 1):
        direct = await asyncio.to_thread(in_process)
        served = await workload(ask, episodes)
        name = str(run) if run else "warm"
        print(f"{name:>6} {direct:15,.0f} {served:13,.0f} {served / direct:6.2f}", flush=True)
        if run:
            pairs.append((direct, served))
    direct, served = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(served / direct for direct, served in pairs)
    print(f"{'median':>6} {direct:15,.0f} {served:13,.0f} {ratio:6.2f}   (target: 0.90 or more)")
    client.close()


def main() -> None:
    """Run the benchmark, or be its server process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        from agentgym.lifeline import die_with_parent
        from agentgym.policy.server import prepare_environment

        die_with_parent(os.getppid())
        prepare_environment(ServerConfig())
        uvloop.run(serve(Path(args.serve[0]), args.serve[1], args.episodes))
        return
    with tempfile.TemporaryDirectory() as folder:
        init_model(Path(folder, "model"))
        address = f"ipc://{folder}/server"
        command = [
            sys.executable,
            __file__,
            "--episodes",
            str(args.episodes),
            "--serve",
            f"{folder}/model",
            address,
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            stdin, stdout = process.stdin, process.stdout

            def answer() -> str:
                """Return the server's next line that is ours; vLLM logs to standard output too."""
                while line := stdout.readline():
                    if line == "ready\n" or line[0].isdigit():
                        return line
                raise SystemExit("the server process ended")

            def in_process() -> float:
                stdin.write("run\n")
                stdin.flush()
                return float(answer())

            answer()
            uvloop.run(measure(address, in_process, args.runs, args.episodes))
            stdin.close()


if __name__ == "__main__":
    main()
