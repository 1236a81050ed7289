"""How public functions are entered: under their name, with errors that tell where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from graphflow.errors import GraphError
from graphflow.op import function, user_location

F = TypeVar("F", bound=Callable[..., Any])


def public(f: F) -> F:
    """Enter a function for Tensor's methods; its errors name it and the user's line."""

    @functools.wraps(f)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except GraphError as error:
            at = f" at {user_location()}: "
            if at in str(error):  # a node, or a function that this one calls, has said so
                raise
            raise type(error)(f"{f.__name__}{at}{error}") from None

    return function(cast(F, located))
