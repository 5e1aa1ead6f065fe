"""PettingZoo's checks, imported without the warning that their own import raises."""

import warnings

with warnings.catch_warnings():
    # pettingzoo.test.api_test imports a game in the way that PettingZoo itself calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

__all__ = ["api_test", "parallel_api_test", "parallel_seed_test", "seed_test"]
