"""Tries the rules on an environment, in a process of their own: what hangs or dies fails its rule, not the command.

The process says what it calls next and what each rule found. One that is silent for `Options.timeout` seconds is ended
and the rules that are left are tried in a new one.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from rich.console import Console
from rich.text import Text

from agentgym.check import rules, tool_rules, worker_rules
from agentgym.check.rule import RULES, NotApplicable
from agentgym.check.subject import Options, Subject, attempt
from agentgym.check.worker_rules import hashing
from agentgym.lifeline import die_with_parent
from agentgym.registry import spec

START_SECONDS = 120.0
CLOSE_SECONDS = 5.0
MAX_LOSSES = 2
"""Processes that may hang or die; the rules that are left then are not tried."""
SHOWN = 5
"""Findings of one rule that are printed."""

# Importing these modules adds their rules.
_RULE_MODULES = (rules, tool_rules, worker_rules)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one rule."""

    rule: str
    status: Literal["ok", "FAIL", "skip"]
    findings: tuple[str, ...] = ()
    """What is wrong, or why the rule was not tried."""
    notes: tuple[str, ...] = ()
    """What else there is to say."""


def print_check(env_id: str, options: Options, console: Console) -> bool:
    """Try all rules, print what they find, and return whether none failed.

    Raises:
        ConfigError: there is no such environment.
    """
    style = {"ok": "green", "FAIL": "bold red", "skip": "dim"}
    counts = dict.fromkeys(style, 0)
    for result in check(env_id, options):
        counts[result.status] += 1
        rule = RULES[result.rule]
        console.print(
            Text.assemble((f"{result.status:5}", style[result.status]), f"{rule.name:14}{rule.sentence}")
        )
        for finding in result.findings[:SHOWN]:
            console.print(Text(f"     {finding}", style="dim" if result.status == "skip" else "red"))
        if len(result.findings) > SHOWN:
            console.print(Text(f"     and {len(result.findings) - SHOWN} more", style="red"))
        if result.status == "FAIL":
            console.print(Text(f"     {rule.advice}", style="yellow"))
        for note in result.notes:
            console.print(Text(f"     {note}", style="dim"))
    console.print(f"{env_id}: {counts['ok']} ok, {counts['FAIL']} failed, {counts['skip']} skipped")
    return not counts["FAIL"]


def check(env_id: str, options: Options) -> Iterator[Result]:
    """Try all rules in a process of their own and yield what they find, one by one.

    Raises:
        ConfigError: there is no such environment.
    """
    env_spec = spec(env_id)
    left, losses = list(RULES), 0
    context = multiprocessing.get_context("spawn")
    while left:
        if losses == MAX_LOSSES:
            yield from (Result(name, "skip", (f"{losses} processes were lost already",)) for name in left)
            return
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, env_id, options, left, os.getpid()))
        with hashing(env_spec):
            child.start()
        theirs.close()
        try:
            for result in _results(ours, list(left), options.timeout):
                left.remove(result.rule)
                yield result
            child.join(CLOSE_SECONDS if not left else 0)
        finally:
            child.kill()
            child.join()
            ours.close()
        losses += 1


def _results(connection: Connection, names: Sequence[str], timeout: float) -> Iterator[Result]:
    """Yield the results of a process; the last one says how it was lost, if it was."""
    what, done, patience = "its start", 0, START_SECONDS
    while done < len(names):
        problem = ""
        try:
            if not connection.poll(patience):
                problem = f"{what} did not return within {patience:g} s"
            else:
                message = connection.recv()
        except (EOFError, ConnectionResetError):
            problem = f"the process ended by itself: {what}"
        if problem:
            yield Result(names[done], "FAIL", (problem,))
            return
        patience = timeout
        if isinstance(message, Result):
            done += 1
            yield message
        else:
            what = message


def _child(
    connection: Connection, env_id: str, options: Options, names: Sequence[str], parent_pid: int
) -> None:
    die_with_parent(parent_pid)
    subject, problem = attempt(lambda: Subject(env_id, options, on_call=connection.send))
    for name in names:
        if subject is None:
            connection.send(Result(name, "FAIL" if name == "builds" else "skip", (problem,)))
            continue
        connection.send(name)
        result = try_rule(name, subject)
        connection.send(result)
        if result.rule == "builds" and result.status == "FAIL":
            subject, problem = None, "it could not be built"
    if subject is not None:
        subject.close()


def try_rule(name: str, subject: Subject) -> Result:
    """Try one rule in this process."""

    def find() -> tuple[str, ...] | NotApplicable:
        try:
            return tuple(RULES[name].find(subject))
        except NotApplicable as reason:
            return reason

    subject.notes.clear()
    found, problem = attempt(find)
    if isinstance(found, NotApplicable):
        return Result(name, "skip", (str(found),))
    findings = (problem,) if found is None else found
    return Result(name, "FAIL" if findings else "ok", findings, tuple(subject.notes))
