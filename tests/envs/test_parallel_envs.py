"""The shipped environments whose agents act at once."""

import pytest
from farama import api_test, parallel_api_test, parallel_seed_test
from pettingzoo.utils import parallel_to_aec

from agentgym_envs.prisoners_dilemma.env import PrisonersDilemma
from agentgym_envs.split_coins.env import SplitCoins

both = pytest.mark.parametrize("cls", [PrisonersDilemma, SplitCoins])


@both
def test_pettingzoo_accepts_it(cls):
    parallel_api_test(cls(), num_cycles=100)
    parallel_seed_test(cls, num_cycles=50)


@both
@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
def test_pettingzoo_accepts_it_by_turns(cls):
    api_test(parallel_to_aec(cls()), num_cycles=100)
