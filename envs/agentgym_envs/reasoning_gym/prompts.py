"""Every text the agent reads, but for the questions and the tools' descriptions."""

ANSWER = "Answer the question. Write the final answer, and nothing else, between <answer> and </answer>."
SUBMIT = "Answer the question: compute with the tools, then submit the final answer and nothing else."
RECORDED = "recorded"


def tagged(answer: str) -> str:
    """Return an answer as `ANSWER` asks for it."""
    return f"<answer>{answer}</answer>"
