"""graphflow: dataflow graphs with autodiff, placed on devices by a cost model."""

from graphflow import ops
