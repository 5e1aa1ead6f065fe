"""The statistics of an evaluation.

Wilson's interval for a share (E. B. Wilson, Journal of the American Statistical Association 22, 1927) and the unbiased
estimator of pass@k (M. Chen et al., Evaluating Large Language Models Trained on Code, 2021).
"""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def wilson(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Return the interval in which the true share lies, given the share found in n > 0 independent trials."""
    scale = 1.0 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n >= k answers, drawn without replacement, hold one of the c right ones.

    That is 1 - C(n - c, k) / C(n, k), as a product that does not overflow.
    """
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; 0 for fewer than two."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
