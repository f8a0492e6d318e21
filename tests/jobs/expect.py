"""How does a job say that a call must be refused?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raises(kind: type[Exception], call: Callable[[], Any], *words: str, what: str = "") -> str:
    """The call raises `kind` here, with all these words; returns what it said."""
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{what}: nothing was raised, where {kind.__name__} with {words} was expected")
    missing = [word for word in words if word not in said]
    assert not missing, f"{what}: {missing} not in: {said}"
    return said
