"""Better placements for a session: on request, and after traced steps that drift.

steps are traced → they drift from the prediction → migrate → the next steps confirm it, or not
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from graphflow.errors import MemoryLimitError
from graphflow.execution.replan_policy import GAIN, Replanned
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration.replanning import advance_check, has_drifted, migrate
from graphflow.planning.migration.table_balance import balance_tables, find_row_moves
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.session")
_HAS_LOSSES = "a worker was lost, and its mirrors have its place until the session is opened anew"


class PlacementImprovement:
    """Looks for better placements of the fetches that have run.

    Args:
        is_automatic: True to plan again after traced steps that drift from the prediction.
    """

    def __init__(self, deployment: Deployment, is_automatic: bool) -> None:
        self._deployment = deployment
        self._planner = deployment.planner
        self._is_automatic = is_automatic

    def learn(self) -> None:
        """Learn from traced steps, for the next plans."""
        deployment = self._deployment
        if deployment.has_losses:
            for compiled in deployment.compiled.values():
                compiled.keep_measured()
        else:
            self._planner.learn(deployment.compiled.values())

    def advance(self) -> None:
        """After a step: advance the comparison of placements. At the end of a traced window: learn,
        and plan again if it drifted from the prediction.

        Raises:
            WorkerLost: a worker was lost while variables moved.
        """
        deployment = self._deployment
        if deployment.should_replan:
            deployment.should_replan = False
            check = deployment.check
            replanned = None
            with suppress(MemoryLimitError):  # raised before anything has moved
                replanned = migrate(deployment, 0.0)
            if replanned is None or replanned.after == replanned.before:
                deployment.begin_check(check)
        elif deployment.check is not None:
            advance_check(deployment)
        improves = self._is_automatic and not deployment.has_losses
        compiled = deployment.steps.last if improves else None
        drift = has_drifted(compiled) if compiled is not None else None
        if drift is None:
            return
        self.learn()
        if drift and deployment.check is None:
            self._planner.remeasure()
            replanned = migrate(deployment, GAIN)
            event = "placement.changed" if replanned.after < replanned.before else "placement.kept"
            _log.tell(event, text=str(replanned))

    def replan(
        self, retry: Callable[[Callable[[], Any]], Any], begin_anew: Callable[[], None]
    ) -> Replanned:
        """Plan all fetches that have run again, and adopt a placement that is predicted faster.

        Args:
            retry: runs an operation, and repeats it after a lost worker.
            begin_anew: forgets the steps before, ahead of a move of rows.

        Raises:
            MemoryLimitError: the graph fits in no memory; nothing has moved.
            WorkerLost: a worker was lost while variables moved.
        """
        self.learn()
        deployment = self._deployment
        replanned = Replanned((), 0.0, 0.0, _HAS_LOSSES)
        if not deployment.has_losses:
            retry(self._planner.remeasure)
            replanned = retry(lambda: migrate(deployment, 0.0))
        if find_row_moves(deployment) is None:
            return replanned
        begin_anew()  # initial values are those of the ranges before
        balanced: Replanned = retry(lambda: balance_tables(deployment, replanned))
        return balanced
