"""What the environment may say: a word of a few, or a complaint."""

from __future__ import annotations

import pytest

import graphflow as gf
from graphflow.environment import SWITCHES, is_on, setting, word
from graphflow.errors import ArgumentError


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
    with pytest.raises(ArgumentError, match=f"{switch} in the environment is on or off, not '"):
        gf.Session()


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", "")
    assert setting("GRAPHFLOW_KEYS") is None


def test_one_of_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_LOG_LEVEL", "loud")
    with pytest.raises(ArgumentError, match="is one of info, warning, error, not 'loud'"):
        word("GRAPHFLOW_LOG_LEVEL", ("info", "warning", "error"))
