"""The rules about tools: their schemas, and what becomes of calls."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.check.rule import NotApplicable, rule
from agentgym.check.subject import Instance, Subject, attempt
from agentgym.errors import EnvError
from agentgym.messages import AgentId, Message, ToolCall, ToolSchema, assistant, tool_call
from agentgym.spaces import AssistantMessage
from agentgym.worker.driver import State

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the chat formats of the usual models and servers take as a function's name."""
TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}
SAMPLES = 3
"""Calls with drawn arguments for each tool."""
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "not")
_REFUSED = "Error: ArgumentsError:"


@rule(
    "tool-schemas",
    "Every tool has a name, a description, and a JSON schema of arguments that are described.",
    "Write a docstring with an `Args:` section, and annotate the parameters of the method.",
)
def tool_schemas(subject: Subject) -> Iterator[str]:
    """Check the schemas of every agent's tools."""
    for agent, tools in _tools(subject).items():
        names = [str(tool.get("function", {}).get("name")) for tool in tools]
        for name in {name for name in names if names.count(name) > 1}:
            yield f"{agent} has two tools called {name!r}"
        for tool in tools:
            yield from _problems(tool)
        _, problem = attempt(lambda tools=tools: json.dumps(tools, allow_nan=False))  # type: ignore[misc]
        if problem:
            yield f"the tools of {agent} are not plain JSON: writing them {problem}"


@rule(
    "tool-calls",
    "A call with arguments that the schema allows is run, and every call is answered by its id, in order.",
    "Let the schema and the code agree; return one `tool` message for each call, as agentgym.ToolEnv does.",
)
def tool_calls(subject: Subject) -> Iterator[str]:
    """Call each tool with drawn arguments, and two calls at once."""
    for agent, tools in _tools(subject).items():
        for tool in tools:
            space = AssistantMessage([tool], seed=0)
            for number in range(SAMPLES):
                calls = _drawn(space, 2)[: 1 + number % 2]
                problem = _answered(subject, agent, calls, refusals=True)
                if problem:
                    yield problem
                    break


@rule(
    "wrong-calls",
    "A call that cannot be right is answered with a text that the model can learn from; nothing is raised.",
    "Answer an unknown tool, malformed JSON and wrong arguments with a `tool` message that says what was wrong.",
)
def wrong_calls(subject: Subject) -> Iterator[str]:
    """Call a tool that is not there, and each tool with arguments that are none."""
    for agent, tools in _tools(subject).items():
        wrong = [tool_call("no_such_tool", "{}", "call_0")]
        for tool in tools:
            name = str(tool["function"]["name"])
            texts = ('{"cut', "[1, 2]", "null", '{"no_such_argument": 1}')
            wrong += [tool_call(name, text, "call_0") for text in texts]
        for call in wrong:
            problem = _answered(subject, agent, [call], refusals=False)
            if problem:
                yield problem
                break


def _tools(subject: Subject) -> dict[AgentId, list[ToolSchema]]:
    """Return the tools of every agent that has some, as read after a reset."""
    found: dict[AgentId, list[ToolSchema]] = {}
    for play in subject.plays[:1]:
        for frame in play.frames:
            for agent, (_, tools) in frame.prompts.items():
                if tools:
                    found.setdefault(agent, tools)
    if not found:
        raise NotApplicable("no agent has tools")
    return found


def _problems(tool: Any) -> Iterator[str]:
    """Yield what is wrong with one tool."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        yield f"a tool is {tool!r:.100}; expected {{'type': 'function', 'function': {{...}}}}"
        return
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        yield f"a tool is called {name!r:.80}; use letters, digits, _ and -, at most 64"
    if not function.get("description"):
        yield f"{name}: the tool has no description"
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        yield f"{name}: its parameters are {parameters!r:.100}; expected a schema of type 'object'"
        return
    properties = parameters.get("properties", {})
    for missing in set(parameters.get("required", ())) - set(properties):
        yield f"{name}: {missing!r} is required and has no schema"
    for parameter, schema in properties.items():
        if not isinstance(schema, Mapping) or not schema.get("description"):
            yield f"{name}: the parameter {parameter!r} has no description"
    for place, problem in _schema_problems(parameters, parameters.get("$defs", {}), ""):
        yield f"{name}{place}: {problem}"


def _schema_problems(schema: Any, definitions: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Yield where a JSON schema is wrong, and how."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield place, f"{schema!r:.80} is no JSON schema"
        return
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in TYPES:
            yield place, f"{kind!r} is no type of JSON; use one of {', '.join(sorted(TYPES))}"
    if not kinds and schema.keys() & {"properties", "items"} and not schema.keys() & set(_COMBINED):
        yield place, "it has no type"
    if "$ref" in schema and str(schema["$ref"]).rsplit("/", 1)[-1] not in definitions:
        yield place, f"it refers to {schema['$ref']!r}, which is not in $defs"
    for name, part in schema.get("properties", {}).items():
        yield from _schema_problems(part, definitions, f"{place}.{name}")
    for name, part in schema.get("$defs", {}).items():
        yield from _schema_problems(part, definitions, f"{place}.$defs.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from _schema_problems(schema[key], definitions, f"{place}.{key}")
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, []):
            yield from _schema_problems(part, definitions, f"{place}.{key}")


def _drawn(space: AssistantMessage, count: int) -> list[ToolCall]:
    """Draw so many calls from a space of one tool."""
    calls: list[ToolCall] = []
    while len(calls) < count:
        message = space.sample()
        assert isinstance(message, dict)
        calls += message.get("tool_calls", [])
    return [
        tool_call(call["function"]["name"], call["function"]["arguments"], f"call_{index}")
        for index, call in enumerate(calls[:count])
    ]


def _answered(subject: Subject, agent: AgentId, calls: Sequence[ToolCall], *, refusals: bool) -> str | None:
    """Say what is wrong with the answers to an agent's calls at its first turn; None where nothing is."""
    shown = "; ".join(f"{call['function']['name']}({call['function']['arguments']})" for call in calls)
    subject.on_call("a tool call")
    messages, problem = attempt(lambda: _call(subject.new(), agent, calls))
    if problem:
        return f"the call {shown} {problem}"
    if messages is None:  # the episode ended with it, or another agent is to speak
        return None
    results = [message for message in messages if message["role"] == "tool"]
    ids = [message.get("tool_call_id") for message in results]
    if ids != [call["id"] for call in calls]:
        return f"the calls {shown} have the ids {[call['id'] for call in calls]}; answered were {ids}"
    for message in results:
        if not message["content"]:
            return f"the call {shown} was answered with an empty text"
        if refusals and message["content"].startswith(_REFUSED):
            return f"the schema allows the call {shown}, and it was refused: {message['content']:.200}"
    return None


def _call(instance: Instance, agent: AgentId, calls: Sequence[ToolCall]) -> list[Message] | None:
    """Return what an agent reads after its calls; None where it is not asked again."""
    driver = instance.driver
    state: State = driver.reset(0)
    asked = {request.agent for request in state.requests}
    for _ in range(len(asked) + 8):  # until it is the agent's turn
        if state.over or agent in asked:
            break
        state = driver.act({other: assistant("") for other in asked})
        asked = {request.agent for request in state.requests}
    if agent not in asked:
        raise EnvError(f"it was never the turn of {agent}")
    answer = assistant("", calls)
    state = driver.act({other: answer if other == agent else assistant("") for other in asked})
    return next((list(r.messages) for r in state.requests if r.agent == agent), None)
