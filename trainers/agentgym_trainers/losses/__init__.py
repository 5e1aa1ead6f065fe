"""Policy losses: pure functions over the trained tokens of a microbatch.

Shapes: N trained tokens; every tensor is [N]. Notation: theta is the model that is trained, mu the policy that sampled
(its log-probabilities come from the policy server), old the trainer's own model before the first update of the batch,
A the advantage, sg() a stopped gradient. A loss is minimised. Each function returns the loss per token (no weights, no
sum) and statistics per token, without gradient: shares are 0 or 1 per token, so their mean is a share.

`menu.token_loss` is what a step calls: the loss named in the batch, with the settings of `[algorithm]`.
"""
