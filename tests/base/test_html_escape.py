"""Text is escaped as the standard library escapes it."""

from __future__ import annotations

import html

from hypothesis import given
from hypothesis import strategies as st

from graphflow.base.html_escape import escape


@given(st.text(alphabet=st.one_of(st.sampled_from("&<>\"';#x27"), st.characters())))
def test_text_is_escaped_as_by_the_standard_library(text: str) -> None:
    assert escape(text) == html.escape(text)
    assert html.unescape(escape(text)) == html.unescape(html.escape(text))
