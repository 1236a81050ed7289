"""Checkpoints: variables by name in safetensors, one file a worker, and a manifest of digests.

    variables ─shard→ safetensors ─files→ disk;  manifest + rename = a checkpoint

`shard` and `manifest` know the formats, `files` what survives a crash, `folder` makes of both one
checkpoint, `store` keeps the last few in a directory, and `remote` is what a worker writes for its
coordinator.
"""

from graphflow.runtime.checkpoint.folder import Checkpoint, load, save
from graphflow.runtime.checkpoint.manifest import FORMAT, Manifest, differences

__all__ = ["FORMAT", "Checkpoint", "Manifest", "differences", "load", "save"]
