"""Failures of tasks, kept in the arena as text: the exception's class, its message and the traceback of user code."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastrt._core.tasks import failures as core
from fastrt.errors import TaskError, format_user_traceback

if TYPE_CHECKING:
    from fastrt.store.client import Store


def keep(
    store: Store, task: int, name: str, exc: BaseException, *, retried: bool = False, pid: int | None = None,
    node: str = "",
) -> None:  # fmt: skip
    """Keep that an attempt of a task has failed. It never raises because of the exception's own methods.

    Args:
        store: of the process that runs or ends the task.
        task: the task.
        name: its name.
        exc: the exception; of a TaskError the exception that it wraps, with its traceback.
        retried: whether another attempt follows.
        pid: of the process that ran it; default: this one.
        node: the name of the other node that ran it; "": this one.
    """
    cause = exc
    try:
        if isinstance(exc, TaskError):
            cause = exc.cause or exc
            text = exc.traceback_text
        else:
            text = format_user_traceback(exc)
    except BaseException as why:  # user code: the exception's methods can raise anything
        text = f"The traceback cannot be shown: {type(why).__name__}."
    try:
        message = str(cause)
    except BaseException as why:
        message = f"The message cannot be shown: {type(why).__name__}."
    texts = (name, type(cause).__qualname__, message, text, node)
    core.keep(store.client, task, texts, os.getpid() if pid is None else pid, retried=retried)
