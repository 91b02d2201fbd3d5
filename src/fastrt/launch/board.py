"""The board of an MPI job: rank 0 publishes its addresses there, and the others read them. `PmiBoard` and `PmixBoard`.

MPI's launchers say nowhere on which machine rank 0 runs. They serve a table to the processes of the job instead (PMI-1
in MPICH's Hydra, PMIx in Open MPI), which MPI itself uses to connect its processes. Between machines that table travels
in the clear, so it holds addresses only; the process at an address proves itself by the job's token.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import socket
from typing import Protocol

from fastrt.errors import FastrtError
from fastrt.launch.detect import Place

_KEY = "fastrt"
_LINE_MAX = 4096
_PMI_VALUE = re.compile(r"[!-~]{1,1023}")  # no space: it separates the fields of a line
_PMIX_GLOBAL, _PMIX_STRING, _PMIX_UINT32, _PMIX_WILDCARD = 3, 3, 14, (1 << 32) - 2


class Board(Protocol):
    """The table of one job.

    Attributes:
        job: the job's name, the same in all its processes.
    """

    job: str

    def size(self) -> int:
        """Return the number of processes."""

    def publish(self, text: str) -> None:
        """Publish a text; called once, by rank 0."""

    def read(self) -> str:
        """Wait for the text of rank 0."""

    def close(self) -> None:
        """Leave the board."""


class PmiBoard:
    """PMI-1, as Hydra serves it over the descriptor PMI_FD: lines of `name=value` words.

    `publish` and `read` wait for each other: all processes pass one barrier between them.

    Source: `src/pmi/simple/simple_pmi.c` of MPICH.
    """

    def __init__(self, place: Place) -> None:
        try:
            self._sock = socket.socket(fileno=int(os.environ["PMI_FD"]))
        except (OSError, ValueError) as exc:
            raise FastrtError(f"PMI_FD={os.environ['PMI_FD']} is no connection to mpiexec: {exc}") from None
        self._size = place.size
        self._ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._space = self._ask("cmd=get_my_kvsname", "my_kvsname")["kvsname"]
        self.job = f"mpiexec {self._space}"

    def size(self) -> int:
        """Return the number of processes."""
        return self._size

    def publish(self, text: str) -> None:
        """Publish a text and wait for the other processes.

        Raises:
            FastrtError: mpiexec refuses it, or has ended.
        """
        if not _PMI_VALUE.fullmatch(text):
            raise FastrtError(f"{len(text)} characters cannot be published by PMI")
        self._ask(f"cmd=put kvsname={self._space} key={_KEY} value={text}", "put_result")
        self._ask("cmd=barrier_in", "barrier_out")

    def read(self) -> str:
        """Wait for the text of rank 0.

        Raises:
            FastrtError: mpiexec refuses it, or has ended.
        """
        self._ask("cmd=barrier_in", "barrier_out")
        return self._ask(f"cmd=get kvsname={self._space} key={_KEY}", "get_result")["value"]

    def close(self) -> None:
        """Say that this process will end; without it mpiexec takes its end for a fault and kills the others."""
        self._ask("cmd=finalize", "finalize_ack")
        self._sock.close()

    def _ask(self, line: str, answer: str) -> dict[str, str]:
        data = b""
        try:
            self._sock.sendall(line.encode() + b"\n")
            while not data.endswith(b"\n") and len(data) < _LINE_MAX:
                piece = self._sock.recv(_LINE_MAX)
                if not piece:
                    raise FastrtError("mpiexec has ended its connection to this process")
                data += piece
        except OSError as exc:
            raise FastrtError(f"the connection to mpiexec is broken: {exc}") from None
        words = dict(word.partition("=")[::2] for word in data.decode("latin-1").split())
        if words.get("cmd") != answer or words.get("rc", "0") != "0":
            raise FastrtError(f"mpiexec answers {data[:80]!r} to {line.split()[0]!r}")
        return words


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("uint32", ctypes.c_uint32), ("rest", ctypes.c_uint64 * 3))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class PmixBoard:
    """PMIx, by the library libpmix that the launcher's own processes use.

    Source: `pmix.h` and `pmix_common.h` of the PMIx standard, version 2 and later.
    """

    def __init__(self, place: Place) -> None:
        name = ctypes.util.find_library("pmix") or "libpmix.so.2"
        try:
            self._pmix = ctypes.CDLL(name)
        except OSError as exc:
            raise FastrtError(
                f"{place.launcher} started this process, and its library libpmix cannot be loaded ({exc}). Install it, "
                "or give --head HOST, the machine of rank 0"
            ) from None
        self._me = _Proc()
        self._check(self._pmix.PMIx_Init(ctypes.byref(self._me), None, ctypes.c_size_t(0)), "PMIx_Init")
        self.job = f"pmix {self._me.nspace.decode('latin-1')}"

    def size(self) -> int:
        """Return the number of processes.

        Raises:
            FastrtError: PMIx does not know it.
        """
        return int(self._get("pmix.job.size", _PMIX_WILDCARD).data.uint32)

    def publish(self, text: str) -> None:
        """Publish a text.

        Raises:
            FastrtError: PMIx refuses it.
        """
        value = _Value(type=_PMIX_STRING, data=_Data(string=text.encode()))
        scope = ctypes.c_uint8(_PMIX_GLOBAL)
        self._check(self._pmix.PMIx_Put(scope, _KEY.encode(), ctypes.byref(value)), "PMIx_Put")
        self._check(self._pmix.PMIx_Commit(), "PMIx_Commit")

    def read(self) -> str:
        """Wait for the text of rank 0.

        Raises:
            FastrtError: PMIx refuses it, or rank 0 has ended.
        """
        value = self._get(_KEY, 0)
        if value.type != _PMIX_STRING:
            raise FastrtError(f"rank 0 has published a value of type {value.type}, not text")
        return str((value.data.string or b"").decode("latin-1"))

    def close(self) -> None:
        """Say that this process will end; without it the launcher takes its end for a fault."""
        self._pmix.PMIx_Finalize(None, ctypes.c_size_t(0))

    def _get(self, key: str, rank: int) -> _Value:
        who, found = _Proc(self._me.nspace, rank), ctypes.POINTER(_Value)()
        self._check(
            self._pmix.PMIx_Get(ctypes.byref(who), key.encode(), None, ctypes.c_size_t(0), ctypes.byref(found)),
            f"PMIx_Get of {key}",
        )
        return found.contents

    def _check(self, code: int, what: str) -> None:
        if code:
            raise FastrtError(f"{what} failed with code {code}; give --head HOST, the machine of rank 0")


def open_board(place: Place) -> Board | None:
    """Return the board of a job, or None where its processes meet at a port that they all know.

    Raises:
        FastrtError: the launcher's interface cannot be reached.
    """
    kinds: dict[str, type[PmiBoard] | type[PmixBoard]] = {"pmi": PmiBoard, "pmix": PmixBoard}
    return kinds[place.meets](place) if place.meets in kinds else None
