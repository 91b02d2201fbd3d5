"""The hierarchy, the code table, and what a TaskError keeps of its cause on the way to the driver."""

import asyncio
import builtins
import copy
import pickle
import sys
import threading
from dataclasses import dataclass

import pytest

import fastrt
import fastrt.collective
from fastrt import errors
from fastrt.errors import ERROR_CODES, FastrtError, TaskError


class Custom(Exception):
    """Its __init__ wants other arguments than `args` holds, so pickle cannot restore it."""

    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Slotted(ValueError):
    __slots__ = ("line",)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int
    detail: str = ""


class Guarded(Exception):
    def __setattr__(self, name, value):
        raise TypeError(f"{name} stays as it is")


class Unpicklable(Exception):
    def __reduce__(self):
        raise RuntimeError("never")


def raised(exc):
    try:
        raise exc
    except BaseException as caught:
        return caught


def wrapped(exc):
    return TaskError.wrap(raised(exc), task_name="parse", pid=812)


def classes():
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, FastrtError)]


def subclasses(kind):
    """Those of every module that is imported."""
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_every_class_says_what_to_do():
    assert len(classes()) > 15
    for kind in classes():
        assert kind.__doc__, kind
        assert len(kind.__doc__.split()) > 8, kind


def test_every_error_that_a_call_can_raise_has_a_public_name():
    of_services = {errors.ReferenceCountError}  # callers of the scheduler's RPCs get its gRPC status
    for kind in {*classes(), errors.ArgumentError} - of_services:
        public = [one for one in (fastrt, fastrt.collective) if kind.__name__ in one.__all__]
        assert public, f"{kind.__name__} is exported by no package"
        assert all(getattr(one, kind.__name__) is kind for one in public)


def test_every_code_of_the_core_has_its_class():
    assert set(ERROR_CODES) == {-1, -2, -3, -4, -5, -6, -7, -8, -10, -11}
    assert all(issubclass(kind, FastrtError) for kind in ERROR_CODES.values())
    assert ERROR_CODES[-3] is errors.GetTimeoutError


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.GetTimeoutError, TimeoutError),
        (errors.ObjectStoreFullError, MemoryError),
        (errors.SerializationError, TypeError),
        (errors.ConfigError, ValueError),
        (errors.NotInitializedError, RuntimeError),
        (errors.NotFoundError, LookupError),
    ],
)
def test_errors_are_also_of_pythons_own_kind(kind, builtin):
    error = pickle.loads(pickle.dumps(kind("why")))
    assert isinstance(error, builtin)
    assert isinstance(error, FastrtError)
    assert str(error) == "why"


def test_every_error_can_be_made_without_its_init():
    """tblib, which pickles exceptions with their tracebacks, makes them by `__new__` alone."""
    for kind in subclasses(FastrtError):
        if "(" not in kind.__name__:  # else another test has made it, of an exception of a task
            assert type(kind.__new__(kind)) is kind


def test_task_error_is_an_instance_of_its_causes_type():
    with pytest.raises(ValueError, match="bad line") as caught:
        raise wrapped(ValueError("bad line", 7))
    error = caught.value
    assert isinstance(error, TaskError)
    assert error.args == ("bad line", 7)
    assert type(error).__name__ == "TaskError(ValueError)"
    assert type(error) is type(wrapped(ValueError("other")))


def test_task_error_keeps_the_fields_that_c_holds():
    error = pickle.loads(pickle.dumps(wrapped(FileNotFoundError(2, "No such file", "/nowhere"))))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.strerror, error.filename) == (2, "No such file", "/nowhere")
    decode = wrapped(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"))
    assert (decode.encoding, decode.object, decode.reason) == ("utf-8", b"\xff", "invalid")


def test_task_error_keeps_attributes_of_user_classes():
    error = wrapped(Custom(3, detail="x"))
    assert isinstance(error, Custom)
    assert (error.code, error.detail) == (3, "x")
    slotted = Slotted("s")
    slotted.line = 9
    assert wrapped(slotted).line == 9


def test_task_error_crosses_pickle_and_copy_unchanged():
    error = wrapped(ValueError("bad"))
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (other.task_name, other.pid, other.traceback_text) == ("parse", 812, error.traceback_text)
        assert repr(other.cause) == "ValueError('bad')"
        assert str(other) == str(error)


@pytest.mark.parametrize("cause", [Frozen(7, "text"), Frozen(code=7), Guarded("text")])
def test_exception_that_refuses_attributes_arrives_as_itself(cause):
    inner = raised(cause)
    outer = raised(Frozen(8))
    object.__setattr__(outer, "__cause__", inner)
    for exc in (inner, outer):
        error = pickle.loads(pickle.dumps(wrapped(exc)))
        assert isinstance(error, type(exc))
        assert isinstance(error, TaskError)
        assert (type(error.cause), vars(error.cause), error.args) == (type(exc), vars(exc), exc.args)
        assert (error.task_name, error.pid) == ("parse", 812)
    assert type(error.__cause__) is type(cause)


@pytest.mark.parametrize("cause", [Unpicklable("text"), Custom(3, detail="text")])
def test_cause_that_does_not_survive_pickle_travels_by_its_parts(cause):
    error = pickle.loads(pickle.dumps(wrapped(cause)))
    assert isinstance(error, type(cause))
    assert type(error.cause) is type(cause)
    assert error.args == cause.args
    assert vars(error.cause) == vars(cause)
    assert "text" in str(error)


def test_what_cannot_travel_inside_of_an_exception_becomes_its_text():
    cause = RuntimeError("broken", lock := threading.Lock())
    cause.lock, cause.number = lock, 7
    error = pickle.loads(pickle.dumps(wrapped(cause)))
    assert isinstance(error, RuntimeError)
    assert error.args == ("broken", repr(lock))
    assert (error.lock, error.number) == (repr(lock), 7)


def test_cause_whose_class_cannot_be_sent_costs_only_the_cause():
    class Local(Exception):
        lock = threading.Lock()

    error = pickle.loads(pickle.dumps(wrapped(Local("text"))))
    assert type(error) is TaskError
    assert error.cause is None
    assert "text" in str(error)


def test_chain_and_notes_are_there_after_the_way():
    try:
        try:
            {}["k"]
        except KeyError:
            raise OSError(2, "while handling it")  # noqa: B904
    except OSError as exc:
        second = exc
    cause = ValueError("at last")
    cause.__notes__ = ["look here"]  # what add_note makes, since 3.11
    cause.__cause__ = second
    error = pickle.loads(pickle.dumps(wrapped(cause)))
    for one in (error, error.cause):
        assert type(one.__cause__) is FileNotFoundError
        assert repr(one.__cause__.__context__) == "KeyError('k')"
        assert one.__suppress_context__
        assert one.__notes__ == ["look here"]
    assert "direct cause" in str(error)


def test_chain_that_goes_round_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    error = pickle.loads(pickle.dumps(TaskError.wrap(one, task_name="t", pid=1, traceback_text="text")))
    assert error.cause.__cause__.__cause__ is error.cause


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has groups of exceptions since 3.11")
def test_group_is_a_group_whose_members_show_the_users_frames_only():
    member = raised(KeyError("one"))
    member.__traceback__ = in_fastrt(member).__traceback__
    group = ExceptionGroup("two", [member, ValueError("b")])  # noqa: F821
    error = pickle.loads(pickle.dumps(wrapped(group)))
    assert isinstance(error, ExceptionGroup)  # noqa: F821
    assert [repr(one) for one in error.exceptions] == ["KeyError('one')", "ValueError('b')"]
    assert error.split(KeyError)[0].exceptions == (error.exceptions[0],)
    assert "in raised" in str(error)
    assert "wrong_place" not in str(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has groups of exceptions since 3.11")
def test_group_stays_one_if_its_members_cannot_be_pickled():
    inner = ExceptionGroup("inner", [KeyError("k"), Custom(5, detail=threading.Lock())])  # noqa: F821
    group = ExceptionGroup("outer", [ValueError("v"), inner])  # noqa: F821
    inner.exceptions[1].members = [inner]  # it contains itself
    error = pickle.loads(pickle.dumps(wrapped(group)))
    assert isinstance(error, ExceptionGroup)  # noqa: F821
    assert error.subgroup(KeyError).exceptions[0].exceptions[0].args == ("k",)
    odd = error.exceptions[1].exceptions[1]
    assert type(odd) is Custom
    assert odd.code == 5
    assert "lock" in odd.detail


def test_exception_inside_of_another_keeps_its_class():
    outer = ValueError("outer", [Custom(1, detail=threading.Lock())])
    outer.last = Custom(2, detail=None)
    error = pickle.loads(pickle.dumps(wrapped(outer)))
    for one, code in ((error.args[1][0], 1), (error.last, 2)):
        assert type(one) is Custom
        assert one.code == code


def in_fastrt(exc):
    """The same exception, raised through a frame that says it lies in fastrt."""
    code = compile("def wrong_place(raised, exc):\n    raise raised(exc)", errors.__file__, "exec")
    space = {}
    exec(code, space)  # noqa: S102
    return raised_by(space["wrong_place"], exc)


def raised_by(function, exc):
    try:
        function(raised, exc)
    except BaseException as caught:
        return caught


def test_variable_asks_for_all_frames(monkeypatch):
    exc = in_fastrt(ValueError("x"))
    assert "wrong_place" not in errors.format_user_traceback(exc)
    for word, shown in (("1", True), ("0", False), ("no", False)):
        monkeypatch.setenv("FASTRT_FULL_TRACEBACK", word)
        assert ("wrong_place" in errors.format_user_traceback(exc)) == shown


def test_cause_that_is_no_ordinary_exception_is_inherited():
    class Stop(BaseException):
        pass

    for cause in (SystemExit(3), KeyboardInterrupt("now"), Stop("here"), asyncio.CancelledError()):
        for error in (wrapped(cause), pickle.loads(pickle.dumps(wrapped(cause)))):
            assert isinstance(error, TaskError)
            assert isinstance(error, type(cause))
            assert error.args == cause.args
            ends_on_ray = not isinstance(cause, asyncio.CancelledError)
            assert isinstance(error, errors.WorkerCrashedError) is ends_on_ray
    assert wrapped(SystemExit(3)).code == 3


class Sealed(BaseException):
    """Allows no subclass, as a group of exceptions allows no second base. Groups came with Python 3.11."""

    def __init__(self, message, inner):
        super().__init__(message, inner)
        self.message = message

    def __init_subclass__(cls, **_):
        raise TypeError("Sealed has no subclasses")


@pytest.mark.parametrize("kind", [Sealed, *filter(None, [getattr(builtins, "BaseExceptionGroup", None)])])
def test_group_that_allows_no_second_base_is_an_error_of_the_worker(kind):
    error = wrapped(kind("here", [KeyboardInterrupt()]))
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, TaskError)
        assert isinstance(one, errors.WorkerCrashedError)
        assert one.cause.message == "here"


def test_cause_that_would_end_a_loop_is_not_inherited():
    # list(map(fastrt.get, refs)) would otherwise end without a word at the first such task.
    error = wrapped(StopIteration(5))
    assert type(error) is TaskError
    assert error.cause.value == 5
    assert type(wrapped(StopAsyncIteration())) is TaskError
    assert type(wrapped(GeneratorExit())) is TaskError


def test_class_that_refuses_a_subclass_gives_a_plain_task_error():
    class Final(Exception):
        def __init_subclass__(cls):
            raise TypeError("final")

    assert type(wrapped(Final("no"))) is TaskError


def test_task_error_through_an_outer_task_keeps_the_first_cause():
    inner = wrapped(KeyError("k"))
    outer = TaskError.wrap(raised(inner), task_name="outer", pid=9)
    assert isinstance(outer, KeyError)
    assert outer.cause is inner.cause
    assert outer.task_name == "outer"
    assert "task 'parse' failed in process 812" in str(outer)


def test_fastrt_error_in_a_task_is_both():
    error = wrapped(errors.ObjectStoreFullError("64 MiB wanted"))
    assert isinstance(error, (TaskError, MemoryError))
    assert isinstance(error, errors.ObjectStoreFullError)


def test_text_shows_the_users_frames_only():
    namespace = {}
    path = errors._PACKAGE_DIR + "worker/main.py"
    exec(compile("def run(f):\n    return f()", path, "exec"), namespace)  # noqa: S102  a frame inside fastrt

    def users():
        raise ValueError("bad")

    try:
        namespace["run"](users)
    except ValueError as exc:
        text = str(TaskError.wrap(exc, task_name="users", pid=1))
    assert text.startswith("task 'users' failed in process 1\nTraceback (most recent call last):")
    assert "in users" in text
    assert "worker/main.py" not in text
    assert text.endswith("ValueError: bad")


def test_text_keeps_the_frames_when_there_are_no_others():
    namespace = {}
    exec(compile("def run():\n    1 / 0", errors._PACKAGE_DIR + "x.py", "exec"), namespace)  # noqa: S102
    with pytest.raises(ZeroDivisionError) as caught:
        namespace["run"]()
    caught.value.__traceback__ = caught.tb.tb_next
    assert "in run" in errors.format_user_traceback(caught.value)


class WithTraceback(Exception):
    """pickle restores it with a traceback, as tblib does with any exception: its frames called pickle."""

    def __reduce__(self):
        return restored_with_traceback, ()


def restored_with_traceback():
    try:
        raise WithTraceback
    except WithTraceback as exc:
        return exc


def test_traceback_that_a_library_restores_is_dropped():
    error = pickle.loads(pickle.dumps(wrapped(WithTraceback())))
    assert type(error.cause) is WithTraceback
    assert error.cause.__traceback__ is None
