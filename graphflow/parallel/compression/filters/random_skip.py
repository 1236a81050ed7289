"""RandomSkip: each number travels with the same probability."""

from __future__ import annotations

from dataclasses import field

from graphflow.base.argument_checks import check_flag, checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.ops.randomness.random import randint
from graphflow.parallel.compression.filter import Parts, State
from graphflow.parallel.compression.filters.selection import Selection, check_share, size_of
from graphflow.parallel.mesh.count_arguments import set_frozen_fields


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class RandomSkip(Selection):
    """Numbers that are chosen at random, each with the same probability.

    Of n numbers the nearest count k to keep·n travels, at least one, at even distances from a
    random start. So a message has a fixed size and holds no positions. Either the numbers are
    multiplied by n / k, so that they are right on average, or the others are kept and added to the
    next tensor (`feedback`). The random numbers follow from the seed and the step, as those of
    `gf.random` do.

    Args:
        keep: the probability with which a number travels, above 0 and up to 1.
        feedback: add the numbers that did not travel to the next tensor.
        rescale: multiply the numbers that travel; default: if there is no feedback.

    Raises:
        ArgumentError: keep is outside of (0, 1]; `rescale` and `feedback` are both true or both
            false.

    Source: Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018 (rand-k), with the
        positions of systematic sampling.
    """

    keep: float
    feedback: bool = False
    rescale: bool | None = None
    sends_positions = False
    excludes_feedback: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"RandomSkip at {user_location()}"
        keep = check_share("RandomSkip", "keep", self.keep)
        check_flag(f"{where}: feedback", self.feedback)
        rescale = self.rescale
        if rescale is None:
            rescale = not self.feedback
        check_flag(f"{where}: rescale", rescale)
        if self.feedback and rescale:
            raise ArgumentError(
                f"{where}: rescale and feedback together let the residual grow: a number that "
                f"travels leaves {1 / keep - 1:.3g} of itself with the wrong sign, and an exchange "
                f"multiplies the squared norm by {(1 - keep) / keep:.3g} on average; leave out one "
                "of them"
            )
        if not self.feedback and not rescale:
            raise ArgumentError(
                f"{where}: without rescale and feedback only {keep:.3g} of the sum would arrive; "
                "set one of them"
            )
        set_frozen_fields(self, keep=keep, rescale=rescale, excludes_feedback=bool(rescale))

    def numbers_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the numbers that travel."""
        size = size_of(spec)
        return spec.with_shape((min(size, max(1, round(self.keep * size))),))

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return values of shape (k,), and the start of shape ()."""
        size = size_of(tensor.spec)
        start = randint(max(size, 1))
        places = self._places(tensor.spec, start)
        values: Tensor = FUNCTIONS["take"](FUNCTIONS["reshape"](tensor, (-1,)), places, 0)
        if self.rescale:
            values = values * (size / max(1, int(values.shape[0])))
        return (values, start), state

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the values at their positions, and zeros elsewhere."""
        values, start = parts
        zeros = FUNCTIONS["zeros"]((size_of(spec),), spec.dtype)
        found = FUNCTIONS["scatter"](zeros, self._places(spec, start), values, axis=0)
        tensor: Tensor = FUNCTIONS["reshape"](found, spec.shape)
        return tensor

    def _places(self, spec: TensorSpec, start: Tensor) -> Tensor:
        """Return the positions of k of n numbers, ⌊(i·n + start) / k⌋: for a start from 0 to n − 1
        with equal probabilities, each position is among them with probability k / n, once."""
        size, (count,) = size_of(spec), map(int, self.numbers_spec(spec).shape)
        places: Tensor = (FUNCTIONS["arange"](count) * size + start) // max(count, 1)
        return places


__all__ = ["RandomSkip"]
