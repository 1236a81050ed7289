"""`gf.plan`, whose plans predict memory as the runtime lays it out, also before any session."""

from __future__ import annotations

import graphflow.runtime.memory.memory_use  # noqa: F401  registers the predictor
from graphflow.placement.plans.building.plan_fetches import plan

__all__ = ["plan"]
