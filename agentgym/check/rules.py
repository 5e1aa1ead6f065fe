"""The rules about episodes: what they promise is in `agentgym.env`."""

import contextlib
import functools
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium

from agentgym.check.rule import NotApplicable, rule
from agentgym.check.subject import Subject, attempt, difference
from agentgym.errors import ModelError
from agentgym.messages import Message
from agentgym.model import check_model
from agentgym.policy.patterns import converse, template_report
from agentgym.policy.template import ChatTokenizer

FARAMA_CYCLES = 20
REPEATS = 2
"""Growing observations in a row that count as a repeated history."""


@rule(
    "builds",
    "It can be built from its id and arguments, in a process that has imported nothing yet.",
    "Give its class as 'module:Class', or register it when its package is imported.",
)
def builds(subject: Subject) -> Iterator[str]:
    """Build it."""
    _, problem = attempt(subject.new)
    if problem:
        yield f"building it {problem}"


@rule(
    "contract",
    "Episodes play: nothing is raised, and what reset and step return has the promised form.",
    "Read the contract in agentgym/env.py: text or messages, finite rewards whose named parts sum to them.",
)
def contract(subject: Subject) -> Iterator[str]:
    """Yield what broke the recorded plays."""
    for play in subject.plays:
        if play.error:
            yield f"{play.error} (seed {play.seed}, {play.by})"


@rule(
    "farama",
    "The public checkers of Gymnasium and PettingZoo accept it.",
    "Do as the checker says; `--timeout` gives a slow environment more time, as env.reset_timeout does in a run.",
)
def farama(subject: Subject) -> Iterator[str]:
    """Run the checkers of the environment's kind."""
    env = subject.new().env
    if subject.spec.kind == "single" and not isinstance(env, gymnasium.Env):
        raise NotApplicable("it is not a gymnasium.Env")
    env = _reported(subject, env)
    subject.on_call("the checker")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        _, problem = attempt(lambda: _run_farama(subject, env))
    if problem:
        yield f"the checker {problem}"


def _run_farama(subject: Subject, env: Any) -> None:
    if subject.spec.kind == "single":
        from gymnasium.utils.env_checker import check_env

        check_env(env, skip_render_check=True, skip_close_check=True)
        return
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

    if subject.spec.kind == "aec":
        api_test(env, num_cycles=FARAMA_CYCLES)
        seed_test(lambda: _reported(subject, subject.new().env), num_cycles=FARAMA_CYCLES)
    else:
        parallel_api_test(env, num_cycles=FARAMA_CYCLES)
        parallel_seed_test(lambda: _reported(subject, subject.new().env), num_cycles=FARAMA_CYCLES)


def _reported(subject: Subject, env: Any) -> Any:
    """Let an instance say which call of the checker's comes next, so that each has its own time; return it."""
    for name in ("reset", "step"):
        setattr(env, name, _reporting(subject, name, getattr(env, name)))
    return env


def _reporting(subject: Subject, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # the checkers look at the parameters
    def call(*arguments: Any, **named: Any) -> Any:
        subject.on_call(f"the checker's {name}")
        try:
            return function(*arguments, **named)
        finally:
            subject.on_call("the checker")

    return call


@rule(
    "deterministic",
    "The same seed and the same actions give the same episode.",
    "Call super().reset(seed=seed) first and draw from self.np_random only; sort what comes out of sets.",
)
def deterministic(subject: Subject) -> Iterator[str]:
    """Play the recorded episodes again in new instances."""
    if subject.wanders:
        yield subject.wanders


@rule(
    "reusable",
    "An environment that has played before plays the same episode as a new one, even when left in the middle.",
    "Let reset set everything that an episode changes.",
)
def reusable(subject: Subject) -> Iterator[str]:
    """Play the recorded episodes one after the other in one instance, the first time only half of each."""
    _needs_determinism(subject)
    instance = subject.new()
    for play in subject.plays:
        subject.replay(play, instance).finish(calls=max(1, len(play.frames) // 2))
        found = difference(play, subject.replay(play, instance).finish())
        if found:
            yield found
            return


@rule(
    "instances",
    "Two instances that are played by turns give the same episodes as alone.",
    "Keep the state in self, not in the class or the module; or leave its isolation at 'process'.",
)
def instances(subject: Subject) -> Iterator[str]:
    """Play pairs of recorded episodes alternately."""
    _needs_determinism(subject)
    for one, other in itertools.pairwise(subject.plays):
        pair = [subject.replay(one), subject.replay(other)]
        while any([play.advance() for play in pair]):
            pass
        for expected, found in zip((one, other), pair, strict=True):
            text = difference(expected, found)
            if text:
                _excuse(subject, text)
                yield text
                return


@rule(
    "global-random",
    "It leaves the process-global generators of random and numpy alone.",
    "Draw from self.np_random; or leave its isolation at 'process'.",
)
def global_random(subject: Subject) -> Iterator[str]:
    """Report the plays whose calls changed the state of the global generators."""
    for play in subject.plays:
        if play.draws_globally:
            text = f"a call seeded or drew from the process-global generators (seed {play.seed}, {play.by})"
            _excuse(subject, text)
            yield text
            return


@rule(
    "close",
    "close may be called at any time and more than once, and other instances go on.",
    "Let close return when there is nothing left to close, and share nothing that it ends.",
)
def close(subject: Subject) -> Iterator[str]:
    """Close before, within and after an episode, twice each."""
    play = subject.plays[0]
    for calls in (0, 1, len(play.frames)):
        instance = subject.new()
        subject.replay(play, instance).finish(calls=calls)
        where = "before the first reset" if not calls else f"after {calls} calls"
        for time in ("", ", the second time"):
            subject.on_call("close")
            _, problem = attempt(instance.driver.close)
            if problem:
                yield f"close {where}{time} {problem}"
                return
    if subject.wanders or subject.alone:  # in a process of its own there is nobody to harm
        return
    bystander = subject.replay(play)
    bystander.advance()
    attempt(subject.new().driver.close)
    found = difference(play, bystander.finish())
    if found:
        yield f"after another instance was closed: {found}"


@rule(
    "observe",
    "In an AEC environment observe(agent) may be called any number of times and changes nothing.",
    "Build the observation in step; let observe only return it.",
)
def observe(subject: Subject) -> Iterator[str]:
    """Play a recorded episode with further calls of `observe`."""
    if subject.spec.kind != "aec":
        raise NotApplicable("it is not an AEC environment")
    _needs_determinism(subject)
    for play in subject.plays[:2]:
        instance = subject.new()
        again = subject.replay(play, instance)
        while again.advance():
            for agent in instance.env.agents:
                first, second = (repr(instance.env.observe(agent)) for _ in range(2))
                if first != second:
                    yield f"observe({agent!r}) gave {first:.100} and then {second:.100} (seed {play.seed})"
                    return
        found = difference(play, again)
        if found:
            yield f"with further calls of observe: {found}"
            return


@rule(
    "only-new",
    "An environment returns only messages that are new; the worker keeps the conversation.",
    "Return what happened since the last answer; leave out earlier messages and the agent's own.",
)
def only_new(subject: Subject) -> Iterator[str]:
    """Look for observations that hold the earlier ones."""
    for play in subject.plays:
        for agent, messages in play.conversations.items():
            found = _repeated(messages)
            if found:
                yield f"{agent} reads its history again (seed {play.seed}, {play.by}): {found!r:.200}"
                return


def _repeated(messages: list[Message]) -> str | None:
    """Return an observation that repeats what was there before, if there are enough of them in a row."""
    seen: list[str] = []
    for is_answer, group in itertools.groupby(messages, key=lambda m: m["role"] == "assistant"):
        if not is_answer:
            seen.append("\n".join(m["content"] for m in group if m["role"] != "system"))
    row = 0
    for before, after in itertools.pairwise(seen):
        row = row + 1 if before and len(after) > len(before) and after.startswith(before) else 0
        if row >= REPEATS:
            return after
    return None


@rule(
    "opening",
    "Who must answer for the first time has something to read.",
    "Give it a system prompt, or a text or message in its first observation.",
)
def opening(subject: Subject) -> Iterator[str]:
    """Look for answers to an empty conversation."""
    for play in subject.plays:
        for agent, messages in play.conversations.items():
            if not any(
                m["content"] for m in itertools.takewhile(lambda m: m["role"] != "assistant", messages)
            ):
                yield f"{agent} must answer and has read nothing (seed {play.seed}, {play.by})"
                return


@rule(
    "fixed-prompt",
    "The system prompt and the tools of an agent stay the same during an episode.",
    "Set them in __init__ or reset; say what changes in the observations.",
)
def fixed_prompt(subject: Subject) -> Iterator[str]:
    """Compare the prompts and tools after every call."""
    for play in subject.plays:
        first: dict[str, Any] = {}
        for number, frame in enumerate(play.frames):
            for agent, (prompt, tools) in frame.prompts.items():
                if first.setdefault(agent, (prompt, tools)) != (prompt, tools):
                    what = "system prompt" if prompt != first[agent][0] else "tools"
                    yield f"the {what} of {agent} changed in step {number} (seed {play.seed}, {play.by})"
                    return


@rule(
    "success",
    "info['success'] is a number from 0 to 1.",
    "Scale it; put other numbers into info['metrics'].",
)
def success(subject: Subject) -> Iterator[str]:
    """Look for a success outside of its range."""
    for play in subject.plays:
        for frame in play.frames:
            for agent, _, info, _ in frame.outcomes:
                if not 0.0 <= info.get("success", 0.0) <= 1.0:
                    yield f"{agent} has success {info['success']:g} (seed {play.seed}, {play.by})"
                    return


@rule(
    "scripted",
    "Its scripted policies can be built and play to an end.",
    "Build them as cls(seed=...); `reset(agent, seed)` begins an episode, `act(messages, tools, info)` answers.",
)
def scripted(subject: Subject) -> Iterator[str]:
    """Play an episode with each of them."""
    if not subject.spec.scripted:
        raise NotApplicable("it lists none")
    for name in subject.spec.scripted:
        play = subject.play(name, 0).finish()
        if play.policy_error:
            yield f"{name}: {play.policy_error}"


@rule(
    "budget",
    "What an agent reads is short enough: each observation, and with a tokenizer the conversation.",
    "Cut long texts and say so in them; `--max-chars` sets the limit of one observation.",
)
def budget(subject: Subject) -> Iterator[str]:
    """Look for the longest texts."""
    longest = max(
        (
            (sum(len(m["content"]) for m in messages), agent, play)
            for play in subject.plays
            for frame in play.frames
            for agent, messages, _ in frame.requests
        ),
        key=lambda found: found[0],
        default=None,
    )
    if longest and longest[0] > subject.options.max_chars:
        length, agent, play = longest
        yield (
            f"{agent} reads {length} characters at once, and {subject.options.max_chars} are allowed "
            f"(seed {play.seed}, {play.by})"
        )
    if subject.options.tokenizer is not None:
        yield from _beyond_context(subject, Path(subject.options.tokenizer))


def _beyond_context(subject: Subject, folder: Path) -> Iterator[str]:
    context, tokenizer = check_model(folder).context_length, ChatTokenizer(folder)
    for play in subject.plays:
        for agent, messages in play.conversations.items():
            with contextlib.suppress(ModelError):  # the rule about the template says it
                tokens = len(tokenizer.encode_chat(messages, play.instance.driver.tools(agent)))
                if tokens > context:
                    yield (
                        f"{agent} has read {tokens} tokens at the end (seed {play.seed}, {play.by}); the model "
                        f"takes {context}"
                    )
                    return


@rule(
    "template",
    "The model's chat template takes its conversations.",
    "Use only the roles that the template knows, or another model.",
)
def template(subject: Subject) -> Iterator[str]:
    """Hold the recorded conversations as a worker does, and note what the template does to usual patterns."""
    if subject.options.tokenizer is None:
        raise NotApplicable("no --tokenizer was given")
    tokenizer = ChatTokenizer(Path(subject.options.tokenizer))
    branched = total = 0
    for play in subject.plays:
        for agent, messages in play.conversations.items():
            heard = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            try:
                conversation = converse(tokenizer, heard, play.instance.driver.tools(agent))
            except ModelError as error:
                yield f"{agent}: {error} (seed {play.seed}, {play.by})"
                return
            total += 1
            branched += len(conversation.branches) > 1
    if branched:
        subject.note(f"{branched} of {total} conversations are several samples: what was said is rewritten")
    tools = next(
        (tools for p in subject.plays for f in p.frames for _, tools in f.prompts.values() if tools), []
    )
    for pattern, verdict in template_report(tokenizer, tools):
        if verdict != "extends":
            subject.note(f"the template on '{pattern}': {verdict}")


def _excuse(subject: Subject, finding: str) -> None:
    """What instances do to each other harms nobody where each has a process of its own."""
    if subject.alone:
        raise NotApplicable(f"it plays in a process of its own; in a shared one: {finding}")


def _needs_determinism(subject: Subject) -> None:
    if subject.wanders:
        raise NotApplicable("episodes are not deterministic to begin with")
