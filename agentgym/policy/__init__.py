"""Who answers: policies, their tokens and the policy server."""
