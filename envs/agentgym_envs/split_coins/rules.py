"""The rules: reading a claim and paying the claims."""

import re


def parse_claim(text: str, coins: int) -> int | None:
    """Return the first integer of a text as a claim; None where there is none from 0 to `coins`."""
    found = re.search(r"-?[0-9]+", text)
    if not found or len(found[0]) > 9 or not 0 <= int(found[0]) <= coins:
        return None
    return int(found[0])


def agree(claims: list[int | None], coins: int) -> bool:
    """Say whether everyone claims and the claims fit together."""
    made = [claim for claim in claims if claim is not None]
    return len(made) == len(claims) and sum(made) <= coins


def payoff(claim: int | None, claims: list[int | None], coins: int) -> float:
    """Return what a claim pays, as a share of all coins; who claims nothing does not stand in the way."""
    fits = sum(other or 0 for other in claims) <= coins
    return claim / coins if claim is not None and fits else 0.0
