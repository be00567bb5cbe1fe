"""Settings are converted once, where they come in, and a config holds values of the right types only."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dcil import ERK, METHODS, OBD, Constant, Global, Uniform
from dcil.errors import UserError
from dcil.train import RECIPES, Config, plan
from dcil.train.config import from_record, to_json
from dcil.train.method_settings import parse_settings, parse_value
from dcil.train.plan import override
from dcil.train.recipes import scaled_epochs
from dcil.train.sweep import read_list


def test_text_and_json_become_values_of_the_fields_types():
    text = parse_settings(METHODS["dns"], {"c": "none", "gradual": "true", "every": "4", "gamma": "0", "scope": "er"})
    assert text == {"c": None, "gradual": True, "every": 4, "gamma": 0.0, "scope": ERK(kernel=False)}
    assert type(text["gamma"]) is float
    assert parse_settings(METHODS["dns"], {"c": 2, "gradual": False, "scope": "uniform", "criterion": "obd"}) == {
        "c": 2.0,
        "gradual": False,
        "scope": Uniform(),
        "criterion": OBD(),
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, 1.5), (int, "1.5"), (int, True), (float, "x"), (float, None), (bool, "yes"), (tuple[int, ...], [1, "x"])],
)
def test_values_of_other_types_are_refused(kind, value):
    with pytest.raises(ValueError, match=r"^must be .*, got"):
        parse_value(kind, value)


@pytest.mark.parametrize("settings", [{"kl": "0"}, {"scope": "global"}, {"stem": 1}, {"every": 2.0}, {"kll": 0.0}])
def test_a_config_takes_typed_settings_only(settings):
    with pytest.raises(UserError):
        Config(settings=settings)
    assert Config(settings={"kl": 0}).build_method(1).kl == 0


def test_a_schedule_is_a_setting_with_a_name():
    config = override(Config(), {"settings": {"schedule": "constant"}})
    assert config.build_method(8).schedule == Constant()
    assert json.loads(to_json(config, config.build_method(8), {"classes": 10, "shape": [1, 8, 8]}))["settings"] == {
        "schedule": "constant"
    }


def test_a_record_has_names_and_plain_values_and_comes_back():
    config = RECIPES["cifar10-resnet20"](method="gmp")
    assert config.settings["scope"] == Global()
    record = json.loads(to_json(config, config.build_method(391), {"classes": 10, "shape": [3, 32, 32]}))
    assert record["settings"] == {"every": 16, "scope": "global", "stem": True, "classifier": False}
    assert from_record(record) == config


def test_a_record_with_settings_as_text_is_still_read():
    """Runs of version 0.1 kept what was typed after --set."""
    config = Config(settings={"kl": 0.0, "every": 4})
    record = json.loads(to_json(config, config.build_method(8), {"classes": 10, "shape": [1, 8, 8]}))
    assert from_record(record | {"settings": {"kl": "0", "every": "4"}}) == config


def test_one_rule_scales_epochs():
    config = replace(RECIPES["cifar10-resnet20"](), finetune_epochs=10)
    scaled = {"epochs": 30, "target_epoch": 22, "milestones": (15, 22), "lr_warmup_epochs": 0, "finetune_epochs": 1}
    assert scaled_epochs(config, 30) == scaled
    assert override(config, {"epochs": 30}) == replace(config, **scaled)
    named = override(config, {"epochs": 30, "finetune_epochs": 4, "milestones": (3,)})
    assert (named.target_epoch, named.finetune_epochs, named.milestones) == (22, 4, (3,))


def test_a_list_of_runs_is_read_by_type(tmp_path):
    file = tmp_path / "list.json"
    file.write_text(json.dumps([{"lr": 1, "milestones": [1, 2], "settings": {"kl": 0}, "name": "a"}]))
    assert read_list(file) == [{"lr": 1.0, "milestones": (1, 2), "settings": {"kl": 0}, "name": "a"}]
    for wrong, said in (({"lr": "fast"}, "lr must be a number"), ({"lrr": 1}, "did you mean 'lr'"), (3, "not a list")):
        file.write_text(json.dumps([wrong]))
        with pytest.raises(UserError, match=said) as error:
            read_list(file)
        assert str(file) in str(error.value)


@pytest.mark.parametrize("method", ["sfp", "fpgm"])
def test_a_run_goes_on_with_the_defaults_that_it_was_begun_with(method):
    """Filters were counted over the network, shortcuts among them, by default and under the protocol alike."""
    for protocol in (False, True):
        config = RECIPES["digits"](method=method, protocol=protocol)
        record = json.loads(to_json(config, config.build_method(10), {"classes": 10, "shape": [1, 8, 8]}))
        assert from_record(record) == config
        earlier = record | {"settings": {"gradual": True} if protocol else {}}
        earlier["method"] |= {"scope": {"type": "Uniform"}, "shortcuts": True}
        found = from_record(earlier)
        assert found.build_method(10).scope == Uniform() and found.build_method(10).shortcuts
        assert (found == config) == protocol


def test_gmp_grows_with_every_step_outside_of_the_protocol():
    assert plan.new_config("gmp", {}, None).schedule == "step"
    assert plan.new_config("gmp", {"schedule": "epoch"}, None).schedule == "epoch"
    assert plan.new_config("gmp", {}, "digits").schedule == plan.new_config("dcil", {}, None).schedule == "epoch"
