"""Every text that an agent reads and that is not tau2's."""

GREETING = "Hi! How can I help you today?"
NO_POWERS = "powers are not allowed; use + - * / and parentheses."
SILENCE = "(silence)"

_AGENT = """\
You work in customer service. The policy below says what you may do and how; keep to it.
In each turn, either write a message to the customer or call tools: text beside a tool call is not delivered.

<policy>
{policy}
</policy>"""

_USER = """\
{guidelines}

<scenario>
{scenario}
</scenario>"""


def agent_prompt(policy: str) -> str:
    """Return the system prompt of the company's agent."""
    return _AGENT.format(policy=policy.strip())


def user_prompt(guidelines: str, scenario: str) -> str:
    """Return the system prompt of a model that plays the customer."""
    return _USER.format(guidelines=guidelines.strip(), scenario=scenario.strip())
