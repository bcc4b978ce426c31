"""Earlier names of settings under their present ones, and settings that were removed."""

import warnings

import pytest

from hmmlm.config.distill import DistillConfig
from hmmlm.config.renames import _NOTICED, RENAMES, Renames, present_names, present_options
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.errors import InputError, InputWarning


@pytest.fixture(autouse=True)
def nothing_noticed() -> None:
    _NOTICED.clear()


def test_names_and_values_of_earlier_versions_are_translated() -> None:
    old = {"model.parameterization": "mlp", "model.form": "code", "schedule.warmup_tokens": 5, "rate": 0.1}
    present = {"model.kind": "mlp", "model.form": "released", "schedule.warmup": 5, "optimizer.lr": 0.1}
    assert present_names(old) == present == present_names(present)


def test_a_setting_that_was_renamed_twice_has_its_last_name() -> None:
    later = Renames(until="9", settings={"optimizer.lr": "optimizer.rate"}, values={"model.kind": {"mlp": "network"}})
    old = {"rate": 0.1, "model.parameterization": "mlp", "model.num_states": 3}
    expected = {"optimizer.rate": 0.1, "model.kind": "network", "model.num_states": 3}
    assert present_names(old, (*RENAMES, later)) == expected


def test_configurations_of_the_last_version_are_read_with_a_notice() -> None:
    message = "^renamed since 0.2: optimizer.rate is now optimizer.lr, optimizer.clip is now optimizer.max_grad_norm$"
    with pytest.warns(InputWarning, match=message):
        config = read_config(RunConfig, {"optimizer": {"rate": 0.5, "clip": 2.0}})
    assert config == read_config(RunConfig, {"optimizer": {"lr": 0.5, "max_grad_norm": 2.0}})
    with pytest.raises(InputError, match=r"optimizer\.rate is now optimizer\.lr: give one of them"):
        read_config(RunConfig, {"optimizer": {"rate": 0.5, "lr": 0.5}})


def test_options_of_the_last_version_are_read_with_one_notice() -> None:
    with pytest.warns(InputWarning, match="^renamed since 0.2: --optimizer.clip is now --optimizer.max-grad-norm$"):
        assert present_options(["--optimizer.clip=2", "--out", "--x"]) == [
            "--optimizer.max-grad-norm=2",
            "--out",
            "--x",
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert present_options(["--optimizer.clip", "2"]) == ["--optimizer.max-grad-norm", "2"]  # no second one
        assert present_options(["x", "--", "--num"]) == ["x", "--", "--num"]  # a value
        assert present_options(["--num", "3"], known=["--out"]) == ["--num", "3"]  # of another command
    with pytest.raises(InputError, match=r"--model\.states is now --model\.num-states: give one of them"):
        present_options(["--model.states", "3", "--model.num-states=4"])


def test_a_distillation_of_the_last_version_is_read() -> None:
    with pytest.warns(InputWarning, match="states is now num_states"):
        assert DistillConfig.model_validate({"model": "m", "states": 8}).num_states == 8


def test_a_removed_setting_is_dropped_unless_it_is_in_use() -> None:
    assert present_names({"model.shard": False, "model.num_states": 3}) == {"model.num_states": 3}
    model = {"num_states": 3, "shard": False}
    assert read_config(RunConfig, {"model": model}) == read_config(RunConfig, {"model": {"num_states": 3}})
    assert model["shard"] is False
    with pytest.raises(InputError, match=r"^configuration: model.shard was removed: use blocks \(model.blocks\)"):
        read_config(RunConfig, {"model": {"shard": True}})
