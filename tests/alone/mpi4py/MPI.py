"""See __init__.py."""

from __future__ import annotations

import platform
from typing import Any

COMM_TYPE_SHARED, ANY_TAG, TAG_UB, BYTE, SUCCESS, MAX, MIN, SUM = 0, -1, 1, "byte", 0, "max", "min", "sum"


class Exception(RuntimeError):  # noqa: N818  (MPI's own name)
    ...


class Status:
    tag = count = 0

    def Get_tag(self) -> int:
        return self.tag

    def Get_count(self, kind: Any) -> int:
        return self.count


class Request:
    def Wait(self) -> None: ...

    def Test(self) -> bool:
        return True

    @staticmethod
    def Waitall(requests: Any) -> None: ...

    @staticmethod
    def Testall(requests: Any) -> bool:
        return True


class Group:
    def Translate_ranks(self, ranks: Any, group: Group) -> list[int]:
        return [0]


class Comm:
    rank, size, group = 0, 1, Group()

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int]] = []  # tag and bytes of what was sent and not received

    def Dup(self, *_: Any) -> Comm:
        return Comm()

    Split = Split_type = Dup

    def Free(self) -> None: ...

    Barrier = Free

    def Get_attr(self, key: int) -> int:
        return 2**30

    def Get_info(self) -> Any:
        return type("Info", (), {"get": lambda *_: None, "Free": lambda *_: None})()

    def Isend(self, message: Any, dest: int, tag: int = 0) -> Request:
        self.waiting.append((tag, len(message[0])))
        return Request()

    def isend(self, thing: Any, dest: int, tag: int = 0) -> Request:
        return Request()

    def Iprobe(self, source: int, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        for sent, count in self.waiting:
            if tag in (ANY_TAG, sent):
                if status:
                    status.tag, status.count = sent, count
                return True
        return False

    def Recv(self, message: Any, source: int, tag: int = ANY_TAG) -> None:
        self.waiting.remove(next(each for each in self.waiting if tag in (ANY_TAG, each[0])))

    def allgather(self, thing: Any) -> list[Any]:
        return [thing]

    def allreduce(self, thing: Any, operation: Any = SUM) -> Any:
        return thing

    def bcast(self, thing: Any, root: int = 0) -> Any:
        return thing

    reduce = bcast


Intracomm = Comm
COMM_WORLD, COMM_SELF = Comm(), Comm()


def Is_initialized() -> bool:
    return True


def Is_finalized() -> bool:
    return False


def Get_library_version() -> str:
    return "no MPI: one rank alone"


def Get_processor_name() -> str:
    return platform.node()
