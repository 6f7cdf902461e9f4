"""Warnings: each has a class that a filter can match, and the page of options lists it."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

from kitsune_jax import errors, warning_classes
from kitsune_jax.errors import Failure, FallbackWarning, KitsuneWarning

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    name: found
    for name, found in vars(warning_classes).items()
    if isinstance(found, type) and issubclass(found, KitsuneWarning) and found is not KitsuneWarning
}


def issued() -> dict[str, list[str]]:
    """The class of each warning that the package issues, as written, with the files that issue it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kitsune_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(source)) if "warn(" in (source := path.read_text()) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                found.setdefault(ast.unparse(node.args[1]) if len(node.args) > 1 else "none", []).append(path.name)
    return found


def test_each_warning_has_a_class_of_its_own() -> None:
    assert issued().keys() == CLASSES.keys()
    assert all(len(files) == 1 for files in issued().values())


def test_users_find_them_in_errors() -> None:
    assert all(getattr(errors, name) is found for name, found in CLASSES.items())


def test_filters_for_pythons_own_classes_still_match() -> None:
    assert all(issubclass(found, RuntimeWarning | UserWarning) for found in CLASSES.values())


def test_each_is_on_the_page_of_options() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert set(re.findall(r"^\| `(\w+Warning)` \|", page, re.MULTILINE)) == CLASSES.keys()


@pytest.mark.expects_fallbacks
def test_a_filter_matches_one() -> None:
    failure = Failure.of(ValueError("planted"), "region0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FallbackWarning)
        errors.record("f", failure)
    errors.forget()
    with pytest.warns(FallbackWarning, match="kitsune_jax could not pipeline region0 of f.*please report it"):
        errors.record("f", failure)
