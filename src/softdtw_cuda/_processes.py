"""The processes of torch.distributed: rows divided among them and gathered again, errors that all raise.

What one process raises, every process raises, so that none waits for an answer that never comes. A process
that is killed is another matter: gloo notices and raises in the others; NCCL does not, and whoever started
them (torchrun does) has to end them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ._journal import difference

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The default group, or one process without a group. Every process makes the same calls in one order."""

    rank: int = 0
    count: int = 1

    def divide(self, work: Tensor) -> list[slice]:
        """For each process a range of the rows, of about the same work (n,), integers on the host."""
        if self.count == 1:
            return [slice(0, len(work))]
        ends = work.cumsum(0)
        total = int(ends[-1]) if len(work) else 0
        shares = ends.new_tensor([total * k // self.count for k in range(1, self.count)])
        cuts = [0, *torch.searchsorted(ends, shares).tolist(), len(work)]
        return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]

    def gather(self, own: Tensor, shares: list[slice]) -> Tensor:
        """The rows of all processes, in every process, out of this one's share."""
        if self.count == 1:
            return own
        home = own.device if dist.get_backend() == "nccl" else torch.device("cpu")
        sizes = [share.stop - share.start for share in shares]
        padded = own.new_zeros((max(sizes), *own.shape[1:]), device=home)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(found, padded)
        rows = torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])
        return rows.to(own.device)


ALONE = Processes()


def default_group() -> Processes:
    """The processes of torch.distributed's default group; this one alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size())


def own_device() -> torch.device:
    """The GPU of this process, by torchrun's LOCAL_RANK or else torch's current one; or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if rank is None else int(rank) % torch.cuda.device_count()
    return torch.device("cuda", index)


def check_device(device: torch.device | str, argument: str = "device") -> torch.device:
    """A device that can compute; of "cuda" without a number the GPU of this process."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{argument} is {device!r}, expected 'cpu', 'cuda', 'cuda:1' or another device of torch."
        ) from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError(
                f"{argument} is {str(device)!r}, but torch finds no GPU here; leave it out to compute on the "
                "CPU."
            )
        if found.index is None:
            return own_device()
        if found.index >= count:
            raise ValueError(
                f"{argument} is {str(device)!r}, but torch finds {count} GPU(s) here, from cuda:0 on."
            )
    elif found.type != "cpu":
        try:
            usable = found.type != "meta" and torch.empty(1, device=found).device.type == found.type
        except (AssertionError, NotImplementedError, RuntimeError, ImportError):
            usable = False
        if not usable:
            raise ValueError(
                f"{argument} is {str(device)!r}, but torch cannot compute there on this machine; leave it "
                "out to compute on the CPU, or on a GPU if there is one."
            )
    return found


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: NCCL sends objects from that, and GPU 0 is not for all processes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_restarted() -> bool:
    """Whether torchrun has started these processes before: an earlier start may have overwritten already."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class ProcessFailed(RuntimeError):
    """Another process of the group has raised an error, which the message quotes."""


def gather_objects(own: T) -> list[T]:
    """What every process brings, in the order of their ranks, in every process."""
    count = default_group().count
    if count == 1:
        return [own]
    found: list[Any] = [None] * count
    try:
        dist.all_gather_object(found, own)
    except RuntimeError as error:
        raise RuntimeError(
            "the processes have lost each other: one was killed, or its machine cannot be reached. Into "
            f"files, the same again goes on from what is finished ({str(error).split('. ')[0]})."
        ) from error
    return found


@contextmanager
def in_every_process() -> Iterator[None]:
    """Waits at its end for every process; where one of them has raised an error, all raise.

    The first process that has one raises its own, the others `ProcessFailed`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = gather_objects(None if error is None else str(error) or type(error).__name__)
    for process, text in enumerate(texts):
        if text is not None:
            if error is not None and process == default_group().rank:
                raise error
            raise ProcessFailed(f"process {process} failed: {text}") from error


def check_agreement(job: Mapping[str, object]) -> None:
    """Raise in every process where one of them was called with something else."""
    first, rank = gather_objects(job)[0], default_group().rank
    with in_every_process():
        if job != first:
            raise ValueError(
                f"process {rank} was called with something else than process 0: {difference(first, job)}; "
                "expected the same arguments in every process."
            )


def on_first(action: Callable[[], T]) -> T:
    """What process 0 gets from the action, in every process; what it raises, every process raises."""
    results: list[T] = []
    with in_every_process():
        if default_group().rank == 0:
            results.append(action())
    return gather_objects(results)[0][0]
