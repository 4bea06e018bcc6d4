"""What users of other libraries find: an error for a wrong argument says what to change."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ._torch_compat import ALLOWED_IN_GRAPH, in_graph

_MIGRATION = {
    "use_cuda": "leave it out: the tensors' device decides",
    "dist_func": "pass it as dist=",
    "verbose": "leave it out; softdtw_barycenter shows its progress, with progress=True",
    "device": "leave it out: the tensors' device decides",
    "n_jobs": "torch.set_num_threads sets the number of threads",
    "sakoe_chiba_radius": "pass it as bandwidth=",
    "lengths": "pass x_lengths= and y_lengths=",
}

_FORMER_NAMES = {"verbose": "progress"}
"""What the paper's library called an argument that has the same meaning here."""

P = ParamSpec("P")
R = TypeVar("R")


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Adds to Python's error for a wrong argument what other libraries' users have to change.

    A former name is taken for the present one, with a warning.
    """
    is_method = "self" in inspect.signature(function).parameters
    graph_name = "" if is_method else in_graph(function)

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if graph_name and torch.compiler.is_compiling():
                result: R = getattr(ALLOWED_IN_GRAPH, graph_name)(*args, **kwargs)
                return result
            return function(*args, **kwargs)
        except TypeError as error:
            # Raised by the call itself, not inside it.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            known = inspect.signature(function).parameters.keys()
            unknown = kwargs.keys() - known
            for former, name in _FORMER_NAMES.items():
                if unknown == {former} and name in known and name not in kwargs:
                    warnings.warn(
                        f"{function.__name__}: {former}= is deprecated, pass {name}= instead.",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    return function(*args, **{name: kwargs.pop(former), **kwargs})  # type: ignore[arg-type]
            hints = [f"{name}: {_MIGRATION[name]}" for name in _MIGRATION if name in unknown]
            if re.search("positional arguments? but", str(error)):
                hints.append("options are passed by name, for example gamma=0.1")
            if not hints:
                raise
            raise TypeError(f"{error}; {'; '.join(hints)} (docs: migrating from other libraries).") from None

    return explained
