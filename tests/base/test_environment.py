"""What the environment may say: a word of a few, or a complaint."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphflow as gf
from graphflow.base.environment import (
    SWITCHES,
    choice_setting,
    folder_setting,
    home_folder,
    is_on,
    setting,
)
from graphflow.errors import ArgumentError
from graphflow.runtime.security.keys import Keyring


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_is_on_unless_it_is_off(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switch, raising=False)
    assert is_on(switch)
    for value, wanted in (("", True), ("on", True), ("off", False)):
        monkeypatch.setenv(switch, value)
        assert is_on(switch) is wanted


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("value", ["of", "0", "OFF", "off "])
def test_a_session_refuses_a_switch_that_says_neither(
    switch: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, value)
    with pytest.raises(
        ArgumentError, match=f"{switch} in the environment must be on or off, not '"
    ):
        gf.Session()


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", "")
    assert setting("GRAPHFLOW_KEYS") is None


def test_one_of_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_LOG_LEVEL", "loud")
    with pytest.raises(ArgumentError, match="must be one of info, warning, error, not 'loud'"):
        choice_setting("GRAPHFLOW_LOG_LEVEL", ("info", "warning", "error"))


def test_a_folder_in_a_home_is_found_and_one_in_nobodys_home_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAPHFLOW_CACHE", "~/kept")
    assert folder_setting("GRAPHFLOW_CACHE") == home_folder() / "kept" == tmp_path / "kept"
    monkeypatch.setenv("GRAPHFLOW_CACHE", "~nobody-of-that-name/kept")
    with pytest.raises(ArgumentError, match="GRAPHFLOW_CACHE in the environment is '~nobody-of"):
        folder_setting("GRAPHFLOW_CACHE")


def test_a_user_without_a_home_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a number for a user: there Python knows of no home."""

    def raise_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", raise_no_home)
    for name in ("GRAPHFLOW_KEYS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert Keyring().folder == Path("/.config/graphflow/keys")
    assert Keyring().pairs() == []
