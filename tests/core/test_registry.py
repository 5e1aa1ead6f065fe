"""agentgym.registry: ids, kinds, entry points and what is said when something is wrong."""

import contextlib
import subprocess
import sys
import textwrap

import gymnasium
import pettingzoo
import pytest

from agentgym.env import AECEnv, Env, ParallelEnv
from agentgym.errors import ConfigError, EnvError
from agentgym.policy.scripted import load_scripted
from agentgym.registry import EnvSpec, kind_of, list_envs, list_sources, make, register, spec
from agentgym_envs import register_envs
from agentgym_envs.guess_number.env import GuessNumber

register_envs()

USER_MODULE = """
    from typing import Any
    import agentgym.registry
    from agentgym.env import AECEnv, Env, ParallelEnv
    from agentgym.policy.scripted import SeededPolicy

    class Mine(Env):
        max_turns = 3
        scripted = {"say": f"{__name__}:Say"}

        def __init__(self, word: str = "hi") -> None:
            self.word = word

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.word, {}

        def step(self, action):
            return "", 0.0, True, False, {}

    class Careful(Mine):
        isolation = "shared"

    class Turns(AECEnv): ...
    class Together(ParallelEnv): ...

    class Duck:
        def reset(self, *, seed=None, options=None): return "quack", {}
        def step(self, action): return "", 0.0, True, False, {}

    class Broken(Env):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    class NoEnv: ...

    def factory(): return Mine()

    class Say(SeededPolicy):
        def act(self, messages, tools, info): return {"role": "assistant", "content": "hi"}

    def register(id, path, **kwargs):
        agentgym.registry.register(id, path, kind="single", **kwargs)

    register(f"{__name__}/Mine-v0", f"{__name__}:Mine", kwargs={"word": "yo"})
"""


@pytest.fixture
def user_module(tmp_path, request):
    """A module of the user's in an otherwise empty working directory."""
    name = f"user_module_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(USER_MODULE))
    with contextlib.chdir(tmp_path):
        yield name


def test_registered_ids_are_found_here_and_in_the_farama_registries():
    assert spec("agentgym/GuessNumber-v0").entry_point == "agentgym_envs.guess_number.env:GuessNumber"
    assert isinstance(make("agentgym/GuessNumber-v0", high=5), GuessNumber)
    assert isinstance(gymnasium.make("agentgym/GuessNumber-v0").unwrapped, GuessNumber)
    assert pettingzoo.make("aec", "agentgym/TicTacToe-v0").possible_agents == ["player_1", "player_2"]
    assert pettingzoo.make("parallel", "agentgym/SplitCoins-v0").possible_agents == ["player_0", "player_1"]


def test_registering_the_same_again_changes_nothing():
    register_envs()
    before = list_envs()
    register_envs()
    assert list_envs() == before
    assert [found.id for found in before] == sorted(found.id for found in before)


def test_an_id_stands_for_one_environment():
    with pytest.raises(ConfigError, match="registered already"):
        register("agentgym/GuessNumber-v0", "somewhere:Else", kind="single")


def test_a_class_can_be_registered_itself():
    register("tests/Guess-v0", GuessNumber, kind="single", kwargs={"high": 3})
    assert spec("tests/Guess-v0").entry_point == "agentgym_envs.guess_number.env:GuessNumber"
    assert make("tests/Guess-v0").high == 3
    assert make("tests/Guess-v0", high=4).high == 4


def test_a_class_that_workers_cannot_import_is_refused():
    class Local(Env): ...

    with pytest.raises(ConfigError, match="top level of a module"):
        register("tests/Local-v0", Local, kind="single")


def test_wrong_registrations_are_refused():
    with pytest.raises(ConfigError, match="not of the form 'module:attribute'"):
        register("tests/A-v0", "nothing", kind="single")
    with pytest.raises(ConfigError, match="kind = 'team'"):
        register("tests/B-v0", "module:Class", kind="team")


def test_an_unknown_id_is_answered_with_the_nearest_ones():
    with pytest.raises(ConfigError, match="nearest are agentgym/GuessNumber-v0"):
        make("agentgym/GessNumber-v0")
    with pytest.raises(ConfigError, match="name its class as 'module:Class'"):
        spec("zzzzzzzzzzzzzzzz")


def test_a_users_class_is_found_in_the_working_directory(user_module):
    found = spec(f"{user_module}:Mine")
    assert found == EnvSpec(
        f"{user_module}:Mine", f"{user_module}:Mine", "single", 3, scripted={"say": f"{user_module}:Say"}
    )
    env = make(f"{user_module}:Mine", word="hello")
    assert env.reset(seed=0) == ("hello", {})
    policy = load_scripted("say", 0, env_spec=found)
    policy.reset("agent", 0)
    assert policy.act([], [], {})["content"] == "hi"


def test_an_environment_has_a_process_of_its_own_unless_it_is_declared_free_of_global_state(user_module):
    isolated = {name: spec(f"{user_module}:{name}").isolation for name in ("Mine", "Careful", "Duck")}
    assert isolated == {"Mine": "process", "Careful": "shared", "Duck": "process"}
    assert spec("gymnasium:FrozenLake-v1").isolation == "shared"
    assert {env.isolation for env in list_envs() if env.id.startswith("agentgym/")} == {"inline", "shared"}
    with pytest.raises(ConfigError, match="isolation = 'thread'; use 'inline', 'shared' or 'process'"):
        register("me/Threads-v0", f"{user_module}:Mine", kind="single", isolation="thread")


def test_an_id_that_a_module_registers_is_found_through_the_module(user_module):
    assert make(f"{user_module}:{user_module}/Mine-v0").word == "yo"
    assert spec(f"{user_module}/Mine-v0").kind == "single"


def test_the_kind_is_inferred_from_the_class(user_module):
    kinds = {name: spec(f"{user_module}:{name}").kind for name in ("Mine", "Turns", "Together", "Duck")}
    assert kinds == {"Mine": "single", "Turns": "aec", "Together": "parallel", "Duck": "single"}
    assert [kind_of(cls) for cls in (Env, AECEnv, ParallelEnv)] == ["single", "aec", "parallel"]


def test_what_is_wrong_with_a_users_id_is_said(user_module):
    for name, complaint in {
        f"{user_module}:Mime": "did you mean Mine",
        f"{user_module}:NoEnv": "has no reset and step",
        f"{user_module}:factory": "is not a class",
        "no_such_module:Env": "there is no module 'no_such_module'",
        f"{user_module}:": "not of the form",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            make(name)


def test_a_missing_dependency_of_the_users_module_is_named(user_module, tmp_path):
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    with pytest.raises(ConfigError, match="needs_more needs the module 'not_installed_here'"):
        spec("needs_more:Env")


def test_a_constructor_that_fails_is_an_env_error_with_its_cause(user_module):
    with pytest.raises(EnvError, match="RuntimeError: no database") as caught:
        make(f"{user_module}:Broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_arguments_that_a_constructor_does_not_take_are_named(user_module):
    with pytest.raises(ConfigError, match=r"'speed'.*takes \(word"):
        make(f"{user_module}:Mine", speed=3)


def test_numbers_are_refused_where_text_is_needed():
    for env_id, wrapper in {
        "gymnasium:CartPole-v1": r"Box.*describe\(env, observation\).*agentgym.TextWrapper",
        f"{__name__}:Numbers": r"Discrete\(3\).*describe\(env, agent, observation\).*agentgym.TextParallelWrapper",
        f"{__name__}:Planes": r"'observation'.*agentgym.TextAECWrapper",
    }.items():
        with pytest.raises(ConfigError, match=wrapper):
            make(env_id)


class Numbers(ParallelEnv):
    possible_agents = ["a"]  # noqa: RUF012  as in PettingZoo

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(3)


class Planes(AECEnv):
    possible_agents = ["a"]  # noqa: RUF012  as in PettingZoo

    def observation_space(self, agent):
        return gymnasium.spaces.Dict(observation=gymnasium.spaces.Discrete(3))


def test_environments_of_other_libraries_are_found_by_prefix():
    found = spec("gymnasium:agentgym/GuessNumber-v0")
    assert (found.id, found.kind) == ("gymnasium:agentgym/GuessNumber-v0", "single")
    assert make("gymnasium:agentgym/GuessNumber-v0", high=3).unwrapped.high == 3
    assert {"gymnasium", "pettingzoo", "openspiel", "minigrid"} <= set(list_sources())


def test_a_name_that_a_source_does_not_have_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"nearest are gymnasium:FrozenLake-v1.*`agentgym list gymnasium:`"):
        make("gymnasium:FrozenLake-v9")


def test_an_unknown_prefix_is_answered_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"no module 'gymnaseum'.*start with gymnasium:"):
        make("gymnaseum:FrozenLake-v1")
    with pytest.raises(ConfigError, match=r"no source 'gymnaseum:'.*there are gymnasium:"):
        list_envs("gymnaseum:")


SOURCE_MODULE = """
    from agentgym.registry import EnvSpec, unknown

    class Source:
        extra = "far-lib"

        def spec(self, name):
            if name == "remote":
                import far_library
            if name not in self.names():
                raise unknown(f"far_lib:{name}", [f"far_lib:{known}" for known in self.names()])
            return EnvSpec(f"far_lib:{name}", "far_source:make", "single", kwargs={"name": name})

        def names(self):
            return ["two", "one"]

    class Named:
        def __init__(self, name, size): self.name, self.size = name, size

    SOURCE, make = Source(), Named
"""


def test_a_package_brings_a_source_of_its_own(tmp_path):
    """Its prefix works with a dash and with an underscore; a broken source beside it does no harm."""
    install(tmp_path, "agentgym.sources", {"far_lib": "far_source:SOURCE", "broken": "broken_source:SOURCE"})
    (tmp_path / "far_source.py").write_text(textwrap.dedent(SOURCE_MODULE))
    in_a_fresh_python(
        tmp_path,
        """
        import agentgym.registry as registry

        def complaint(call, argument):
            try:
                call(argument)
            except registry.ConfigError as error:
                return str(error)

        assert registry.spec("far-lib:one") == registry.spec("far_lib:one")
        env = registry.make("far-lib:one", size=3)
        assert (env.name, env.size) == ("one", 3)
        assert [found.id for found in registry.list_envs("far-lib:")] == ["far_lib:one", "far_lib:two"]
        assert "nearest are far_lib:one" in complaint(registry.make, "far_lib:ones")
        assert "needs the module 'far_library'" in complaint(registry.make, "far_lib:remote")
        assert "pip install 'agentgym-rl[far-lib]'" in complaint(registry.spec, "far_lib:remote")
        assert "source broken: could not be loaded" in complaint(registry.spec, "broken:one")
        """,
    )


def install(folder, group, entry_points):
    """Make a folder look like one where packages with these entry points are installed."""
    for name, target in entry_points.items():
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


def in_a_fresh_python(folder, script):
    """Run a script in an interpreter of its own that finds what lies in a folder."""
    code = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(script)}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


def test_packages_are_loaded_only_when_an_unknown_id_is_asked_for(tmp_path):
    """A package with an entry point; a broken one beside it does no harm."""
    install(tmp_path, "agentgym.envs", {"plug": "plug_envs:go", "broken": "broken_envs:go"})
    (tmp_path / "plug_envs.py").write_text(
        "from agentgym.registry import register\n"
        "def go(): register('plug/A-v0', 'plug_envs:A', kind='single')\n"
    )
    in_a_fresh_python(
        tmp_path,
        """
        import agentgym.registry as registry
        registry.register("here/B-v0", "nowhere:B", kind="aec")
        assert registry.spec("here/B-v0").kind == "aec"
        assert "plug_envs" not in sys.modules
        assert registry.spec("plug/A-v0").entry_point == "plug_envs:A"
        assert "plug/A-v0" in [found.id for found in registry.list_envs()]
        try:
            registry.spec("plug/B-v0")
        except registry.ConfigError as error:
            assert "not loaded: broken_envs:go" in str(error), error
        else:
            raise AssertionError
        """,
    )


def test_importing_the_registry_imports_no_environment():
    script = "import sys, agentgym.registry, agentgym.tools; assert 'agentgym_envs' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_scripted_policies_are_found_by_name_or_path():
    found = spec("agentgym/GuessNumber-v0")
    assert load_scripted("noisy", 1, env_spec=found, kwargs={"p": 0.25}).p == 0.25
    assert load_scripted("agentgym_envs.guess_number.policies:Bisection", 1)
    with pytest.raises(ConfigError, match="has random, noisy, expert"):
        load_scripted("clever", 1, env_spec=found)
    with pytest.raises(ConfigError, match="no methods `reset` and `act`"):
        load_scripted("collections:UserDict", 1)
