"""One colour for each device, told apart by lightness as well as hue; the same in every drawing."""

from __future__ import annotations

import colorsys

from graphflow.base.lazy_dataclass import dataclass

INK, FAINT, WIRE, PAPER = "#1c2430", "#5c6877", "#a3adba", "#ffffff"
CUT = "#d0105a"  # a tensor that leaves its device
WAIT = "#d9dee5"


@dataclass(frozen=True)
class Shade:
    """`strong` for borders and bars, `tint` to fill boxes that hold dark text."""

    strong: str
    tint: str


CLIENT = Shade("#7a8592", "#eceff3")
_SHADES = (
    Shade("#3a6fb8", "#dbe7f7"),
    Shade("#e08a2e", "#fdebd5"),
    Shade("#2f9468", "#d5efe2"),
    Shade("#8456b8", "#e9def6"),
    Shade("#1f93a8", "#d3eef3"),
    Shade("#98872a", "#f2edcf"),
    Shade("#c25a48", "#f8dfda"),
    Shade("#5b6bc0", "#e0e3f6"),
    Shade("#8b6249", "#efe3da"),
    Shade("#6d8f35", "#e6efd5"),
)


def shade(index: int) -> Shade:
    """The colours of the device of that index; after the tenth, hues as far apart as can be."""
    if index < len(_SHADES):
        return _SHADES[index]
    hue = (index * 0.6180339887) % 1.0
    return Shade(_hex(hue, 0.45, 0.5), _hex(hue, 0.91, 0.55))


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(
        f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation)
    )
