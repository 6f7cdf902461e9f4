"""The environment: a variable that does not exist is a warning, a value that means nothing an error, at once and by name."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any

import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import config
from kitsune_jax.errors import UnknownVariableWarning

ROOT = pathlib.Path(kj.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("KITSUNE_FORCED", "KITSUNE_FORCE"),
        ("KITSUNE_NUM_THREAD", "KITSUNE_NUM_THREADS"),
        ("KITSUNE_DISABLED", "KITSUNE_DISABLE"),
        ("KITSUNE_LOGLEVEL", "KITSUNE_LOG_LEVEL"),
        ("KITSUNE_XYZZY", ""),
    ],
)
def test_a_variable_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, typo: str, meant: str) -> None:
    monkeypatch.setenv(typo, "1")
    monkeypatch.setattr(config, "_warned", set())
    with pytest.warns(UnknownVariableWarning, match=rf"environment variable {typo} has no effect") as caught:
        kj.pipeline(jnp.sin)
    told = str(caught[0].message)
    assert f"did you mean {meant}?" in told if meant else all(v in told for v in config.VARIABLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kj.pipeline(jnp.cos)  # once is enough


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KITSUNE_FORCE", "ja"),
        ("KITSUNE_STRICT", "2"),
        ("KITSUNE_DISABLE", "TRUE?"),
        ("KITSUNE_LOG_LEVEL", "LOUD"),
        ("KITSUNE_NUM_THREADS", "0"),
        ("KITSUNE_NUM_THREADS", "four"),
        ("KITSUNE_PROFILE", "Zen 5"),
        ("KITSUNE_PROFILE", "zen5-0"),
        ("KITSUNE_PROFILE", "zen9"),
        ("KITSUNE_EMULATOR_SEED", "-1"),
        ("KITSUNE_CUDA_ARCH", "hopper"),
        ("KITSUNE_NVRTC_DIR", "/no/such/folder"),
        ("KITSUNE_CUDA_AVOID", "two lanes"),
        ("KITSUNE_TUNE", "sometimes"),
        ("KITSUNE_PROGRESS", "loud"),
    ],
)
def test_a_value_that_means_nothing_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}='{re.escape(value.upper() if name == 'KITSUNE_LOG_LEVEL' else value)}'"):
        kj.pipeline(lambda x: x)


def test_the_variables_that_exist_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    good: dict[str, Any] = {
        "KITSUNE_DISABLE": "0",
        "KITSUNE_FORCE": "yes",
        "KITSUNE_STRICT": "off",
        "KITSUNE_LOG_LEVEL": "debug",
        "KITSUNE_CACHE_DIR": tmp_path,
        "KITSUNE_CUDA_ARCH": "sm_103a",
        "KITSUNE_NVRTC_DIR": tmp_path,
        "KITSUNE_CUDA_AVOID": "sm90-spatial-*, sm80-vertical-resident-lanes3",
        "KITSUNE_EMULATOR_SEED": "7",
        "KITSUNE_NUM_THREADS": "2",
        "KITSUNE_PROFILE": "zen5",
        "KITSUNE_TUNE": "All",
        "KITSUNE_PROGRESS": "off",
    }
    assert good.keys() == set(config.VARIABLES)
    for name, value in good.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("KITSUNES", "another program's")
    kj.pipeline(lambda x: x)
    for name in good:
        monkeypatch.setenv(name, "")
    kj.pipeline(lambda x: x)  # an empty variable is one that is not set


@pytest.mark.parametrize(
    ("setting", "profile", "want"),
    [("", "", "on"), ("", "zen5", "off"), ("on", "zen5", "on"), ("off", "", "off"), (" ALL ", "", "all")],
)
def test_plans_of_a_named_profile_are_timed_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, setting: str, profile: str, want: str
) -> None:
    monkeypatch.setenv("KITSUNE_TUNE", setting)
    monkeypatch.setenv("KITSUNE_PROFILE", profile)
    assert config.tune() == want


def imported_with(name: str, value: str) -> subprocess.CompletedProcess[str]:
    program = f"import os; os.environ[{name!r}] = {value!r}; import kitsune_jax"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_import_fails_at_once_for_a_value_that_means_nothing() -> None:
    done = imported_with("KITSUNE_NUM_THREADS", "many")
    assert done.returncode != 0 and "ValueError: KITSUNE_NUM_THREADS" in done.stderr


def test_the_import_warns_of_a_variable_that_does_not_exist() -> None:
    done = imported_with("KITSUNE_FORCED", "1")
    assert done.returncode == 0 and "UnknownVariableWarning" in done.stderr and "did you mean KITSUNE_FORCE?" in done.stderr


def test_every_variable_is_documented() -> None:
    table = (ROOT / "docs" / "options.md").read_text()
    assert all(f"`{name}=" in table and f"``{name}``" in str(config.__doc__) for name in config.VARIABLES)
    assert set(re.findall(r"`(KITSUNE_[A-Z_]+)=", table)) <= set(config.VARIABLES)
