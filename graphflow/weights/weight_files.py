"""Files of weights: one of safetensors, or several with Hugging Face's index of them.

Arrays are views of mapped files, so that a variable that is divided over workers is read in parts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphflow.base.argument_checks import format_value
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, CheckpointError
from graphflow.runtime import checkpoint as checkpoints
from graphflow.runtime.checkpoint import files
from graphflow.runtime.checkpoint.folder import MANIFEST, write_error_text
from graphflow.runtime.checkpoint.manifest import list_some
from graphflow.runtime.checkpoint.shard import map_all_arrays, replace_by_parts

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MODEL = "model"
"""The stem of the files in Hugging Face's folders."""
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
_PICKLE_STARTS = (b"\x80", b"PK\x03\x04")
_MAX_INDEX_BYTES = 1 << 28


@dataclass(frozen=True)
class WeightSource:
    """Weights that were found.

    Attributes:
        place: where, for reports and errors.
        arrays: by the names that they have there.
        has_more: True for a session's checkpoint, which has slots of optimisers, too.
    """

    place: str
    arrays: Mapping[str, Any]
    has_more: bool = False


# Reading ----------------------------------------------------------------------------------------


def read_source(source: Any) -> WeightSource:
    """Return the weights in a file, in a folder, or in a dict.

    Raises:
        CheckpointError: they cannot be read.
        ArgumentError: the source is no path and no dict.
    """
    if isinstance(source, Mapping):
        strange = [name for name in source if not isinstance(name, str)]
        if strange:
            raise ArgumentError(f"names of weights are text, not {format_value(strange[0])}")
        return WeightSource("the dict", source)
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            f"weights come from a path or a dict from names to arrays, not {format_value(source)}"
        )
    path = files.absolute_path(source)
    if path.is_dir():
        return _read_folder(path)
    index = path if path.name.endswith(".json") else path.with_suffix(INDEX)
    if index.is_file() and not (path.is_file() and path != index):
        return WeightSource(str(index), _read_index(index))
    return WeightSource(str(path), _read_file(path))


def _read_folder(folder: Path) -> WeightSource:
    if (folder / MANIFEST).is_file():
        return WeightSource(str(folder), checkpoints.load(folder).variables, has_more=True)
    if (index := folder / (MODEL + INDEX)).is_file():
        return WeightSource(str(index), _read_index(index))
    single = folder / (MODEL + SUFFIX)
    found = [single] if single.is_file() else sorted(folder.glob("*" + SUFFIX))
    if len(found) == 1:
        return WeightSource(str(found[0]), _read_file(found[0]))
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} files of weights and no {MODEL}{INDEX}; give one of them: "
            f"{list_some([each.name for each in found])}"
        )
    pickles = sorted(each for each in folder.iterdir() if each.suffix in _PICKLES)
    if pickles:
        raise _pickle_error(pickles[0])
    raise CheckpointError(
        f"{folder} holds no weights: no {MODEL}{SUFFIX}, no {MODEL}{INDEX}, and no checkpoint of a "
        "session"
    )


def _read_file(path: Path) -> dict[str, Any]:
    """Return views of the arrays of a safetensors file.

    Raises:
        CheckpointError: it cannot be read, is damaged, or is a pickle.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(9)
        is_ours = start[8:] == b"{"  # after the header's length, which may begin like a pickle
        if not is_ours and (path.suffix in _PICKLES or start.startswith(_PICKLE_STARTS)):
            raise _pickle_error(path)
        return dict(map_all_arrays(files.map_file(path, path.stat().st_size)))
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"cannot read {path} as a safetensors file: {error}") from error
    except (OSError, ValueError, files.WrongSize) as error:  # ValueError: an empty file
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _pickle_error(path: Path) -> CheckpointError:
    """Return the error for a file that only torch reads; it can hold code that reading runs."""
    new = path.with_suffix(SUFFIX).name
    return CheckpointError(
        f"{path} is a pickle, which can run any code, so it is not read; convert it once where "
        'torch is installed: python -c "import torch, safetensors.torch as s; s.save_file({n: '
        f"t.clone().contiguous() for n, t in torch.load('{path.name}', weights_only=True).items()"
        f"}}, '{new}')\""
    )


def _read_index(index: Path) -> dict[str, Any]:
    """Return views of the arrays in the files that an index lists.

    Raises:
        CheckpointError: the index or a file cannot be read, or a file lacks an array.
    """
    try:
        homes = json.loads(files.read_file(index, _MAX_INDEX_BYTES))["weight_map"]
        homes = {str(name): str(file) for name, file in homes.items()}
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f'{index} is no index of weights: JSON with a "weight_map" from names to files'
        ) from None
    names = sorted(set(homes.values()))
    outside = [name for name in names if os.path.basename(name) != name or name in ("", "..")]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not in its folder")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} lists {show_count(len(names), 'file')}, and {list_some(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not beside it"
        )
    parts = {name: _read_file(index.parent / name) for name in names}
    lacking = [name for name, file in homes.items() if name not in parts[file]]
    if lacking:
        raise CheckpointError(
            f"{index.parent / homes[lacking[0]]} lacks {list_some(lacking)}, which {index.name} "
            "says is in it; is it of another version of the model?"
        )
    return {name: parts[file][name] for name, file in homes.items()}


# Writing ----------------------------------------------------------------------------------------


def write_files(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: Mapping[str, str], most: int
) -> Path:
    """Write arrays to a file of safetensors, or to several and an index.

    Args:
        path: a file, or a folder for "model.safetensors".
        metadata: texts for the header of each file.
        most: the most bytes of arrays in a file, unless one array has more.

    Returns:
        The file, or the index.

    Raises:
        CheckpointError: something cannot be written; no file is incomplete.
    """
    target = files.absolute_path(path)
    if target.suffix in _PICKLES:
        raise CheckpointError(
            f"weights are saved as safetensors, which torch reads by safetensors.torch.load_file: "
            f"{target.with_suffix(SUFFIX)} instead of {target.name}"
        )
    target = target if target.suffix == SUFFIX else target / (MODEL + SUFFIX)
    index = target.with_suffix(INDEX)
    groups = _group(arrays, most)
    try:
        files.make_folder(target.parent)
        if len(groups) == 1:
            replace_by_parts(target, arrays, metadata)
            index.unlink(missing_ok=True)  # of a larger model that was here before
            return target
        homes: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f"{target.stem}-{number:05}-of-{len(groups):05}{SUFFIX}"
            replace_by_parts(target.parent / name, group, metadata)
            homes |= dict.fromkeys(group, name)
        total = sum(array.nbytes for array in arrays.values())
        content = {"metadata": {"total_size": total}, "weight_map": homes}
        files.replace_file(index, json.dumps(content, indent=2).encode(), 0o666)
        target.unlink(missing_ok=True)  # of a smaller model that was here before
    except OSError as error:
        raise CheckpointError(write_error_text(target, error)) from error
    return index


def _group(arrays: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Return the arrays in groups of at most so many bytes, in order."""
    groups: list[dict[str, Any]] = [{}]
    used = 0
    for name, array in arrays.items():
        if groups[-1] and used + array.nbytes > most:
            groups.append({})
            used = 0
        groups[-1][name] = array
        used += array.nbytes
    return groups
