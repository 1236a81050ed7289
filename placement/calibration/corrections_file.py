"""The file in which sessions keep what traces taught about this machine, beside its profile.

Corrections belong to one calibration. A file that is damaged, or of another machine or calibration,
reads as no corrections.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphflow.placement.calibration.profile_file import profile_path, write_json
from graphflow.placement.calibration.trace_corrections import TraceCorrections


def basis_of(profile: Mapping[str, Any]) -> str:
    """Return a key that tells one calibration from another."""
    text = json.dumps(profile.get("devices"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def corrections_path(folder: Path | None = None) -> Path:
    """Return the path of this machine's corrections, beside its profile."""
    path = profile_path(folder)
    return path.with_name(path.name.replace("machine-", "learned-"))


def read_corrections(profile: Mapping[str, Any], folder: Path | None = None) -> TraceCorrections:
    """Read what earlier sessions learned under this calibration; empty if nothing usable is
    kept.
    """
    basis = basis_of(profile)
    try:
        data = json.loads(corrections_path(folder).read_text())
    except (OSError, ValueError, RecursionError):
        return TraceCorrections(basis)
    return TraceCorrections.from_dict(data, basis)


def write_corrections(learned: TraceCorrections, folder: Path | None = None) -> None:
    """Keep the corrections for later sessions if the folder can be written."""
    write_json(corrections_path(folder), learned.to_dict())
