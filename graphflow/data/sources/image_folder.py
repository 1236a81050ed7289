"""Images in one folder for each class, as a source. Pillow reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class ImageFolder:
    """Images as float32 (rows, channels, height, width) from 0 to 1, and the number of their class.

    Args:
        at: begins each error.
        folder: holds a folder for each class; classes are numbered in the order of their names.
        size: (height, width) to which each image is scaled.
        channels: 3 for RGB, 1 for grey.

    Attributes:
        classes: their names.
    """

    def __init__(
        self, at: str, folder: str | os.PathLike[str], size: tuple[int, int], channels: int
    ) -> None:
        self._at = at
        self._image = _pillow(at)
        self._size = size
        self._mode = {1: "L", 3: "RGB"}.get(channels)
        if self._mode is None:
            raise ArgumentError(f"{at}: channels must be 1 or 3, not {channels!r}")
        root = Path(folder)
        if not root.is_dir():
            raise ArgumentError(f"{at}: {str(root)!r} is no folder")
        self.classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in _ENDINGS
        ]
        if not self._files:
            raise ArgumentError(
                f"{at}: {str(root)!r} holds no images in folders, one folder for each class"
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, indices: Array) -> Batch:
        chosen = [self._files[int(i)] for i in indices]
        channels = 3 if self._mode == "RGB" else 1
        images = np.empty((len(chosen), channels, *self._size), "float32")
        for row, (file, _) in enumerate(chosen):
            images[row] = self._read(file)
        return {"image": images, "label": np.array([n for _, n in chosen], "int64")}

    @property
    def files(self) -> list[Path]:
        """The files of the images."""
        return [file for file, _ in self._files]

    def _read(self, file: Path) -> Any:
        try:
            with self._image.open(file) as image:
                height, width = self._size
                scaled = image.convert(self._mode).resize((width, height))
                pixels = np.asarray(scaled, "float32") / 255
        except OSError as error:
            raise ArgumentError(f"{self._at}: {str(file)!r} cannot be read: {error}") from error
        return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]


def _pillow(at: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ArgumentError(f"{at} needs Pillow: pip install 'graphflow[data]'") from None
    return Image
