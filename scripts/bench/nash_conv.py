"""How far the checkpoints of a self-play run are from an equilibrium: NashConv, by OpenSpiel, exactly.

    .venv/bin/python scripts/bench/nash_conv.py RUN_DIR

for a run of an `openspiel:` game for two (`scripts/configs/kuhn_poker.toml`). The probabilities of all answers at all
information sets are those of the checkpoint's model folder, computed by transformers in float32, with the tokens, the
temperature and the limit on tokens of the run. Printed besides: the largest probability of an illegal answer anywhere.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyspiel
import torch
from transformers import AutoModelForCausalLM

from agentgym.config_file import load_config
from agentgym.messages import Message, assistant
from agentgym.policy.template import ChatTokenizer
from agentgym.policy.tokens import Conversation
from agentgym_envs.sources.spiel.nash_conv import Probabilities, nash_conv


def probabilities_of(model: Path, *, temperature: float, max_tokens: int) -> Probabilities:
    """Return the probabilities with which a model gives answers."""
    tokenizer = ChatTokenizer(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def ids_of(message: Message) -> Sequence[int]:
        return tokenizer.encode_answer(message)[:max_tokens]

    def prompt_of(messages: Sequence[Message]) -> list[int]:
        """Return the ids that the policy server is given where the answers before were sampled."""
        said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        conversation = Conversation(tokenizer)
        conversation.initial(messages[: said[0] if said else None])
        for here, after in pairwise([*said, len(messages)]):
            conversation.append_said(messages[here], ids_of(messages[here]))
            conversation.append_messages(messages[here + 1 : after])
        return conversation.prompt

    def probability(prompt: list[int], answer: Sequence[int]) -> float:
        with torch.no_grad():
            logits_KV = network(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs_KV = (logits_KV / temperature).log_softmax(-1)
        return float(logprobs_KV.gather(1, torch.tensor(answer)[:, None]).sum().exp())

    def probabilities(messages: Sequence[Message], answers: Sequence[str]) -> list[float]:
        prompt = prompt_of(messages)
        return [probability(prompt, ids_of(assistant(text))) for text in answers]

    return probabilities


def main() -> None:
    """Print a line for each checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    config = load_config(run / "config.json")
    game = pyspiel.load_game(config.env.id.removeprefix("openspiel:"))
    sampling = config.sampling
    for model in sorted(run.glob("checkpoints/step-*/model")):
        found, illegal = nash_conv(
            game,
            probabilities_of(model, temperature=sampling.temperature, max_tokens=sampling.max_tokens),
        )
        print(f"{model.parent.name}: NashConv {found:.3f}, illegal answers at most {illegal:.4f}", flush=True)


if __name__ == "__main__":
    main()
