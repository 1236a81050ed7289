"""Checkpoints: variables by name in safetensors, one file a worker, and a manifest of digests.

    variables ─shard→ safetensors ─files→ disk;  manifest + rename = a checkpoint

`shard` and `manifest` define the formats. `files` has the operations that survive a crash. `folder`
makes one checkpoint of them, and `store` keeps the last few in a directory. `remote` writes a
worker's shard for its coordinator.
"""

from graphflow.runtime.checkpoint.folder import Checkpoint, load, save
from graphflow.runtime.checkpoint.manifest import FORMAT, Manifest, differences

__all__ = ["FORMAT", "Checkpoint", "Manifest", "differences", "load", "save"]
