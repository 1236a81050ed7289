"""The public path of ops: what modules of users' own ops import (docs/models/extending.md)."""

from graphflow.ir.op import *  # noqa: F403
from graphflow.ir.op import __all__  # noqa: F401
