import json
from pathlib import Path
from typing import Any

import pytest
from builders import config_of
from full_disk import files_end_at
from pydantic import ValidationError

from agentgym.config import Config
from agentgym.config_file import all_keys, load_config, save_config
from agentgym.errors import ConfigError
from agentgym.trainer_config import TrainerConfig

CONFIGS = sorted((Path(__file__).parents[2] / "scripts/configs").glob("*.toml"))
SMALLEST = """
[env]
id = "agentgym/GuessNumber-v0"
[policies.learner]
model = "models/tiny"
"""


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def load(folder: Path, extra: str = "", *overrides: str) -> Config:
    return load_config(toml(folder, SMALLEST + extra), overrides)


def test_the_smallest_configuration_has_defaults_for_the_rest(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == config_of(model="models/tiny")
    assert (config.learner, config.model, config.run_dir) == (
        "learner",
        Path("models/tiny"),
        Path("runs/run"),
    )
    assert config.episodes_per_step == config.rollout.tasks_per_step * config.rollout.group_size


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("[run]\nsteeps = 5", "unknown key 'run.steeps'; did you mean 'steps'?"),
        ("[rolout]\ngroup_size = 4", "unknown key 'rolout'; did you mean 'rollout'?"),
        (
            "[policies.learner2]\nmodell = 'x'",
            "unknown key 'policies.learner2.modell'; did you mean 'model'?",
        ),
        ("[run]\nqqqqqq = 5", "unknown key 'run.qqqqqq'; known here: dir, name, seed, steps"),
        ("[run]\ngroup_size = 5", "unknown key 'run.group_size'; did you mean 'rollout.group_size'?"),
        ("[run]\nsteps = 'many'", "run.steps: Input should be a valid integer.*(found 'many')"),
        ("[run]\nsteps = -1", "run.steps: Input should be greater than or equal to 0 (found -1)"),
        ("[run]\nname = '../out'", "run.name: String should match pattern"),
        ("[rollout]\ngroup_size = [2]", "rollout.group_size: Input should be a valid integer"),
        ("[sampling]\ntop_p = 0", "sampling.top_p: Input should be greater than 0 (found 0)"),
        ("[algorithm]\nloss = 'grpo'", "algorithm.loss: Input should be 'dppo_tv', 'ppo_clip'"),
        (
            "[algorithm]\nclip_high = inf\nloss = 'cispo'",
            "algorithm.clip_high: Input should be a finite number",
        ),
        (
            "[algorithm]\ncorrection = 'tis'",
            "algorithm: correction = 'tis' does not go with loss = 'dppo_tv', whose ratio is to the rollout policy "
            "already; it goes with ppo_clip, gspo",
        ),
        (
            "[algorithm]\ncorrection_low = 2\ncorrection_high = 1.5",
            "algorithm: correction_low = 2 is not below correction_high = 1.5",
        ),
        (
            "[algorithm]\nloss = 'topr'\nclip_low = 0.1",
            "algorithm: clip_low and clip_high go with ppo_clip, decoupled_ppo, gspo, cispo, not with loss = 'topr'",
        ),
        (
            "[algorithm]\nloss_mean = 'constant'",
            "algorithm: loss_mean = 'constant' and loss_length go together; give both or neither",
        ),
        (
            "[algorithm]\noverlong_buffer = 64",
            "algorithm.overlong_buffer = 64 is more tokens than an answer may have: sampling.max_tokens = 32",
        ),
        (
            "[algorithm]\nadvantage = 'rae'\n[rollout]\nmax_filtered = 9",
            "rollout.max_filtered leaves out groups whose plays compare as equal, but algorithm.advantage = 'rae' does",
        ),
        (
            "[algorithm]\nkl_reference_coefficient = 0.1\nkl_reference_estimator = 'k1'",
            "algorithm: kl_reference_estimator = 'k1' in the loss has a gradient whose mean is 0; set",
        ),
        (
            "[algorithm]\nkl_reference_coefficient = 1\nkl_reference_weighted = true\nkl_reference_in = 'reward'",
            "algorithm: kl_reference_weighted goes with kl_reference_in = 'loss'; a reward has no gradient",
        ),
        (
            "[algorithm]\nadvantage = 'gae'",
            "algorithm.advantage: Input should be 'group_mean', 'group_mean_std'",
        ),
        (
            "[algorithm]\nloss = 'gspo'\ndual_clip = 3",
            "algorithm: dual_clip goes with ppo_clip and decoupled_ppo",
        ),
        (
            "[algorithm]\nloss = 'ppo_clip'\ndual_clip = 1",
            "algorithm.dual_clip: Input should be greater than 1",
        ),
        ("[policies]\nopponent = 3", "policies.opponent: Input should be a valid dictionary"),
        (
            "[policies.both]\nmodel = 'x'\nscripted = 'y'",
            "policies.both: give exactly one of `model`, `scripted`, `pool` and `endpoint`, not model and scripted",
        ),
        (
            "[policies.neither]",
            "policies.neither: give exactly one of `model`, `scripted`, `pool` and `endpoint`",
        ),
        (
            "[policies.three]\npool = 'learner'\nscripted = 'x'\nendpoint = 'http://a'\nmodel = 'm'",
            "policies.three: give exactly one of .*, not endpoint and pool and scripted",
        ),
        (
            "[policies.judge]\nendpoint = 'http://a/v1'",
            "policies.judge: with `endpoint` say in `model` which",
        ),
        ("[policies.judge]\nendpoint = 'a/v1'\nmodel = 'm'", "policies.judge.endpoint: String should match"),
        (
            "[policies.foe]\nscripted = 'x'\nkeep = 3",
            "policies.foe: `keep` goes with `pool`; this policy is of the kind `scripted`",
        ),
        ("[policies.foe]\nmodel = 'x'\napi_key_env = 'K'", "`api_key_env` goes with `endpoint`"),
        ("[policies.foe]\nscripted = 'random'\nhistory = 'keep'", "`history` goes with `model` or `pool`"),
        (
            "[policies.past]\npool = 'learner'\nsample = 'best'",
            "policies.past.sample: Input should be 'uniform', 'latest'",
        ),
        ("[policies.'a@b']\nscripted = 'x'", "policies.a@b.[key]: String should match pattern"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_would_be_right(
    tmp_path: Path, extra: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extra)
    for part in message.split(".*"):
        assert part in str(caught.value)
    assert str(tmp_path / "run.toml") in str(caught.value)


def test_every_problem_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[run]\nsteps = 'x'\nseeed = 1\n[workers]\nslots = 0")
    assert len(str(caught.value).splitlines()) == 4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env is required and was not given\n  policies is required"):
        load_config(toml(tmp_path, ""))
    with pytest.raises(ConfigError, match=r"env\.id is required and was not given"):
        load_config(toml(tmp_path, "[env]\n[policies.learner]\nmodel = 'x'"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policies_to_train": []}, "policies_to_train\n  List should have at least 1 item"),
        ({"policies_to_train": ["learner", "learner"]}, "name each policy once"),
        ({"policies_to_train": ["learner", "other"]}, r"names 'other'; set policies\.other\.model"),
        (
            {"policies": {"b": {"model": "m"}}, "policies_to_train": ["learner", "b"]},
            "policy_mapping lets no agent play 'b', which is to be trained",
        ),
        (
            {
                "policies": {"b": {"model": "m"}},
                "policies_to_train": ["learner", "b"],
                "policy_mapping": {"x": "b"},
                "trainer": {"keep_checkpoints": 1},
            },
            r"whose checkpoints must be of one step: set trainer\.keep_checkpoints >= 2",
        ),
        ({"policies_to_train": ["pupil"]}, r"names 'pupil'; set policies\.pupil\.model"),
        ({"policies": {"learner": {"scripted": "random"}}}, r"set policies\.learner\.model"),
        ({"policy_mapping": {"a": "boss"}}, r"policy_mapping\.a = 'boss'; known policies: \['learner'\]"),
        (
            {"policies": {"b": {"scripted": "s"}}, "policy_mapping": {"a": {"b": 0.5, "learner": 0.4}}},
            r"the probabilities of policy_mapping\.a sum to 0\.9, not to 1",
        ),
        ({"policy_mapping": {"a": {"learner": 0.5, "b": 0.5}}}, r"policy_mapping\.a = 'b'; known policies"),
        (
            {"policies": {"b": {"scripted": "s"}}, "policy_mapping": {"a": "b", "*": "b"}},
            r"policy_mapping lets no agent play 'learner', which is to be trained",
        ),
        (
            {"policies": {"b": {"scripted": "s"}, "past": {"pool": "b"}}},
            r"policies\.past\.pool = 'b'; a pool holds snapshots of one of policies_to_train: \['learner'\]",
        ),
        (
            {"policy_mapping_fn": "a:b", "seat_rotation": True},
            r"takes the place of policy_mapping and seat_rotation",
        ),
        (
            {"policy_mapping_fn": "a:b", "policy_mapping": {"a": "learner"}},
            r"takes the place of policy_mapping",
        ),
        (
            {"rollout": {"group_size": 1}},
            r"'group_mean' compares the members of a group; set rollout\.group_size >= 2",
        ),
        ({"sampling": {"top_p": 0.9}}, r"top_p = 0\.9 and top_k = 0 sample from a part of the vocabulary"),
        ({"sampling": {"top_k": 5}}, r"for training set temperature > 0, top_p = 1 and top_k = 0"),
        ({"sampling": {"temperature": 0}}, r"sampling\.temperature = 0, top_p = 1 and top_k = 0 sample from"),
        ({"server": {"max_model_len": 32}}, r"sampling\.max_tokens = 32 leaves no room for a prompt"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**sections)


def test_where_nothing_is_trained_any_sampling_goes() -> None:
    assert config_of(sampling={"temperature": 0, "top_p": 0.9, "top_k": 5}, run={"steps": 0})


def test_a_group_of_one_is_allowed_where_nothing_is_compared_in_it() -> None:
    assert config_of(rollout={"group_size": 1}, algorithm={"advantage": "turn_batch_mean"})
    assert config_of(rollout={"group_size": 1}, run={"steps": 0})


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.steps=20", "run", "steps", 20),
        ("run.steps = 20", "run", "steps", 20),
        ("run.name=second", "run", "name", "second"),
        ("run.name='second'", "run", "name", "second"),
        ("run.dir=/tmp/a=b", "run", "dir", "/tmp/a=b"),
        ("trainer.learning_rate=1e-4", "trainer", "learning_rate", 1e-4),
        ("trainer.router_replay=off", "trainer", "router_replay", "off"),
        ("env.kwargs={low = 3, words = ['a']}", "env", "kwargs", {"low": 3, "words": ["a"]}),
        ("env.kwargs.deep.low=3", "env", "kwargs", {"deep": {"low": 3}}),
    ],
)
def test_an_override_takes_toml_values_and_bare_words(
    tmp_path: Path, override: str, section: str, key: str, value: Any
) -> None:
    assert getattr(getattr(load(tmp_path, "", override), section), key) == value


def test_overrides_reach_dictionaries_and_lists_and_the_last_one_wins(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "",
        "policies.foe.scripted=random",
        "policy_mapping.player_2=foe",
        "policies_to_train=['learner']",
        "run.seed=3",
        "run.seed=4",
    )
    assert (config.policies["foe"].scripted, config.policy_mapping) == ("random", {"player_2": "foe"})
    assert config.run.seed == 4


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3", ".steps=3", "", "run.=1"])
def test_an_override_of_another_form_says_the_right_one(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value, as in run\.steps=20"):
        load(tmp_path, "", override)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'id' is a value, not a section"):
        load(tmp_path, "", "env.id.name=3")


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*line 2"):
        load_config(toml(tmp_path, "[run]\nsteps = = 3"))
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_config(tmp_path / "a.json")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a text file"):
        load_config(tmp_path / "b.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_resolved_settings_are_read_back_as_they_were(tmp_path: Path, path: Path) -> None:
    config = load_config(path, ["env.kwargs={a = [1, {b = 'c'}]}", "algorithm.tv_threshold=0.3"])
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text())["algorithm"]["tv_threshold"] == 0.3


def test_settings_that_do_not_fit_on_the_disk_leave_those_that_were_there(tmp_path: Path) -> None:
    config = load_config(CONFIGS[0])
    save_config(config, tmp_path / "config.json")
    with files_end_at(100), pytest.raises(OSError, match="too large"):
        save_config(load_config(CONFIGS[0], ["run.steps=3"]), tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_each_policy_that_servers_answer_for_has_a_model_folder() -> None:
    policies = {
        "past": {"pool": "pupil"},
        "pupil": {"model": "a"},
        "frozen": {"model": "b"},
        "unused": {"model": "c"},
        "judge": {"endpoint": "http://localhost:1/v1", "model": "d"},
        "random": {"scripted": "random"},
    }
    mapping = {"x": {"past": 0.5, "random": 0.5}, "y": "frozen", "z": "judge"}
    config = config_of(policies=policies, policies_to_train=["pupil"], policy_mapping=mapping)
    assert config.served == {"pupil": Path("a"), "frozen": Path("b"), "past": Path("a")}
    assert next(iter(config.served)) == "pupil"
    assert config.mapped == {"past", "random", "frozen", "judge", "pupil"}
    kinds = {name: policy.kind for name, policy in config.policies.items()}
    assert kinds == {
        "learner": "model",
        "past": "pool",
        "pupil": "model",
        "frozen": "model",
        "unused": "model",
        "judge": "endpoint",
        "random": "scripted",
    }


def test_a_function_may_let_any_policy_play() -> None:
    policies = {"past": {"pool": "learner"}, "random": {"scripted": "random"}}
    config = config_of(policies=policies, policy_mapping_fn="my:mapping")
    assert config.mapped == {"learner", "past", "random"}
    assert list(config.served) == ["learner", "past"]


def test_every_key_has_a_description() -> None:
    keys = dict(all_keys())
    assert [key for key, field in keys.items() if not field.description] == []
    assert {
        "run.steps",
        "env.id",
        "policies.NAME.model",
        "policies_to_train",
        "policy_mapping",
    } <= keys.keys()
    assert len(keys) > 70


def test_settings_cannot_be_changed_by_the_processes_that_read_them() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config_of().run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"nproc": 3, "tp": 2}, "nproc = 3 is not a multiple of tp \\* pp = 2"),
        ({"nproc": 2, "tp": 2, "ep": 2}, "is not a multiple of ep \\* etp = 4"),
        ({"nproc": 2, "tp": 2, "etp": 1}, "would not sum the experts' gradients"),
    ],
)
def test_layouts_that_would_go_wrong_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**layout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": -1}, "lora_rank\n.*greater than or equal to 0"),
        ({"lora_alpha": 0}, "lora_alpha\n.*greater than 0"),
        ({"lora_layers": []}, "lora_layers\n.*at least 1 item"),
        ({"lora_layers": ["router"]}, "lora_layers.0\n.*'attention' or 'mlp'"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)  # type: ignore[arg-type]


def test_what_tensor_and_pipeline_ranks_leave_divides_the_batch() -> None:
    assert TrainerConfig(nproc=8, tp=2, pp=2, ep=2, etp=1).dp == 2
    assert TrainerConfig(nproc=4, tp=2, ep=2).expert_tp == 2
