"""How much disk a library takes, with all that its installation requires."""

from __future__ import annotations

import importlib
import importlib.util
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def installed_bytes(name: str) -> int:
    """Return the bytes of a distribution and of its requirements, without extras' and bytecode.

    Raises:
        ImportError: the distribution is not installed.
    """
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen = set()
    while waiting:
        each, extras = item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            found[each] = distribution(each)
        except PackageNotFoundError as error:
            raise ImportError(f"{each} is not installed") from error
        for line in found[each].requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in extras or {""}):
                continue
            waiting.append((canonical(requirement.name), frozenset(requirement.extras)))
    return sum(map(own_bytes, found.values()))


def canonical(name: str) -> str:
    """Return the one spelling of a distribution's name."""
    return name.lower().replace("_", "-").replace(".", "-")


def own_bytes(installed: Distribution) -> int:
    """Return the bytes of a distribution's files; of an editable one, those of its package."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        spec = importlib.util.find_spec(canonical(installed.name).replace("-", "_"))
        assert spec is not None
        (folder,) = spec.submodule_search_locations or ()
        files = [p for p in walk(Path(folder)) if p.suffix != ".pyc"]
    else:
        files = [Path(str(f.locate())) for f in installed.files or () if f.suffix != ".pyc"]
    return sum(path.stat().st_size for path in files if path.is_file())


def walk(folder: Path) -> list[Path]:
    """Return all files below a folder, also behind links to folders."""
    return [
        inner for path in folder.iterdir() for inner in (walk(path) if path.is_dir() else [path])
    ]
