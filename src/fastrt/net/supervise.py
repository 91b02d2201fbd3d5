"""Child processes of fastrt: started from this installation, watched, limited in their restarts, and ended.

`subprocess` is imported where a process is started: children import this module too, and most start none.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fastrt.errors import ConfigError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object

if TYPE_CHECKING:
    import subprocess

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def spawn(
    module: str,
    call: str,
    *arguments: str,
    name: str,
    pass_fds: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: dict[str, str] | None = None,
    new_session: bool = True,
    flags: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs a module of this installation of fastrt.

    Args:
        module: the module; the process imports its `main`.
        call: the expression that the process evaluates, such as "main()"; it can use `sys`.
        *arguments: for `sys.argv`.
        name: shown by `ps` and `top` as `fastrt-NAME`, of at most 15 characters.
        pass_fds: descriptors that the process inherits beside the standard ones.
        stdin: as for `subprocess.Popen`; None: /dev/null.
        stdout, stderr: as for `subprocess.Popen`; None: those of this process.
        env: variables; None: those of this process.
        new_session: whether Ctrl-C at the terminal reaches only this process, which then ends its children in order.
        flags: options of its interpreter.
    """
    import subprocess

    # Imported modules stay until the process ends: the garbage collector skips them while they load and later.
    code = (
        f"with open('/proc/self/comm', 'w') as its_name: its_name.write('fastrt-{name}')\n"
        f"import gc, sys; gc.disable(); sys.path.insert(0, {_PACKAGE_PARENT!r}); from {module} import main; "
        f"gc.freeze(); gc.enable(); {call}; "
        "from fastrt.net.supervise import leave; leave()"
    )
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, *arguments],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=new_session,
    )


@contextlib.contextmanager
def passed_settings(settings: dict[str, Any]) -> Iterator[int]:
    """Settings in a descriptor, for one process that starts in this context; it calls `take_settings` with the number.

    All users of the machine can read a process's arguments, and each has at most 128 KiB.

    Args:
        settings: what JSON can say.
    Raises:
        ConfigError: they have more than `SETTINGS_BYTES_MAX` bytes.
    """
    text = json.dumps(settings).encode()
    if len(text) > SETTINGS_BYTES_MAX:
        raise ConfigError(f"the settings have {len(text)} bytes together; at most {SETTINGS_BYTES_MAX} are allowed")
    fd = os.memfd_create("fastrt-settings")
    with open(fd, "wb") as file:
        file.write(text)
        file.flush()
        yield fd


def take_settings(fd: int, what: str) -> dict[str, Any]:
    """Read the settings that this process was started with, and close their descriptor.

    Args:
        fd: of `passed_settings`.
        what: what they are, for messages.
    Raises:
        ForeignTextError: they are longer than `SETTINGS_BYTES_MAX`.
    """
    with open(fd, "rb") as file:
        file.seek(0)
        return read_object(file.read(SETTINGS_BYTES_MAX + 1), what, own=True, bytes_max=SETTINGS_BYTES_MAX)


def leave() -> None:
    """End this process as the interpreter does, but leave its memory to the kernel.

    To free the objects one by one takes 12 ms of processor time, and copies the pages that a forked process shares.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def fail(what: str, error: BaseException | None) -> NoReturn:
    """Report an error that this process does not know, and end it as a kill does: its starter starts another one.

    Args:
        what: this process, for the message.
        error: the exception.
    """
    try:
        sys.stderr.write(f"fastrt: the {what} failed, and another takes its place: {error!r}\n")
        traceback.print_exception(error)
        sys.stderr.flush()
    finally:  # also where the report needs memory or a descriptor that it does not get
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)  # not reached


def fail_with_threads(what: str) -> None:
    """Have an error that ends a thread end this process, too; see `fail`. Without the thread it would stand still."""
    threading.excepthook = lambda failed: fail(what, failed.exc_value)


def interpreter_flags() -> list[str]:
    """Return the options of this process's interpreter (`-s`, `-S`, `-O`, `-W`, `-X` and so on), for `spawn`."""
    import subprocess

    # multiprocessing starts its children with these, too.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    known = {flag.partition("=")[0] for flag in flags}
    for name, value in sys._xoptions.items():  # that function knows the interpreter's own ones only
        if name not in known:
            flags += ["-X", name if value is True else f"{name}={value}"]
    return flags


def announce(address: str) -> None:
    """Write this process's address to standard output, a pipe to the process that started it: one line of JSON."""
    os.write(1, json.dumps({"address": address}).encode() + b"\n")


def wait_for_starter() -> None:
    """Return when the process that started this one ends, or closes the pipe that is standard input here."""
    while os.read(0, 1024):
        continue


def end_with_starter() -> None:
    """Have a thread end this process by SIGTERM when the process that started it ends; see `wait_for_starter`."""

    def watch() -> None:
        wait_for_starter()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="fastrt-starter", daemon=True).start()


def wait_any(
    children: Iterable[subprocess.Popen[bytes]], wake: int | None = None, timeout_s: float | None = None
) -> list[subprocess.Popen[bytes]]:
    """Wait until a child has ended, or a descriptor can be read.

    Args:
        children: not reaped yet.
        wake: the descriptor; None: there is none.
        timeout_s: seconds to wait at most; None: without a limit.
    Returns:
        The children that have ended; the caller reaps them.
    """
    poll = select.poll()  # `select` takes no descriptor above 1023
    watched = {os.pidfd_open(child.pid): child for child in children}
    try:
        for fd in [*watched, *([] if wake is None else [wake])]:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(None if timeout_s is None else 1000 * timeout_s)
        return [watched[fd] for fd, _ in ready if fd in watched]
    finally:
        for fd in watched:
            os.close(fd)


def reap(child: subprocess.Popen[bytes], patience_s: float | None = None) -> bool:
    """Wait for a child's end, and close its standard input and output.

    Args:
        child: it has ended, or is about to.
        patience_s: seconds to wait before the child is killed; None: wait without a limit.
    Returns:
        Whether it ended in time.
    """
    import subprocess

    try:
        child.wait(patience_s)
        return True
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    finally:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


class RestartLimit:
    """Limits how often a process that dies is started again.

    Args:
        most: the number of deaths within `within_s` seconds after which a restart is still allowed.
        within_s: seconds.
    """

    def __init__(self, most: int, within_s: float) -> None:
        self._most, self._within_s = most, within_s
        self._deaths: list[float] = []

    def allows_another(self) -> bool:
        """Record a death now; return whether the process may be started again."""
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < self._within_s] + [now]
        return len(self._deaths) <= self._most
