"""Recipes of the package: each is a valid configuration and starts with a comment that explains it."""

from importlib import resources

import pytest

from hmmlm.config.recipe import load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_has_an_explanation(name: str) -> None:
    config = load_recipe(name)
    assert config.model.states > 0
    text = (resources.files("hmmlm.config") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")


def test_the_recipe_of_the_demo_exists() -> None:
    assert "demo" in recipe_names()
