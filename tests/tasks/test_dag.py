"""Graphs of calls: `.bind` and `.execute`."""

import pytest

import fastrt
from fastrt.errors import UnsupportedError
from fastrt.tasks.dag import InputNode, MultiOutputNode


@fastrt.remote
def plus(a, b=1):
    return a + b


@fastrt.remote
class Log:
    def __init__(self, first):
        self.lines = [first]

    def add(self, line):
        self.lines.append(line)

    def read(self):
        return self.lines


def test_node_that_two_others_name_is_submitted_once(rt):
    counter = Log.remote("")
    shared = counter.add.bind("once")
    both = plus.bind(plus.bind([shared], []), plus.bind([], [shared]))
    assert len(fastrt.get(both.execute())) == 2
    assert fastrt.get(counter.read.remote()) == ["", "once"]
    assert len(fastrt.get(both.execute())) == 2
    assert fastrt.get(counter.read.remote()) == ["", "once", "once"]


def test_calls_of_a_bound_actor_run_in_the_order_in_which_they_were_bound(rt):
    log = Log.bind("a")
    log.add.bind("b")
    log.add.options(max_task_retries=1).bind(plus.bind("c", "d"))
    read = log.read.bind()
    log.add.bind("later")
    assert fastrt.get(read.execute()) == ["a", "b", "cd"]
    assert fastrt.get(read.execute()) == ["a", "b", "cd"]
    assert fastrt.get(log.execute().read.remote()) == ["a"]


def test_nodes_say_what_they_stand_for():
    inner = plus.bind(1)
    node = plus.options(name="sum", max_retries=2).bind(inner, b={"x": inner})
    assert (node.get_args(), node.get_kwargs()) == ((inner,), {"b": {"x": inner}})
    assert node.get_options() == {"name": "sum", "max_retries": 2}
    assert (inner.get_options(), InputNode().get_options()) == ({}, {})
    log = Log.options(name="log", max_pending_calls=10).bind("a")
    assert log.get_options() == {"name": "log", "max_pending_calls": 10}
    assert log.add.options(name="adds").bind("b").get_options() == {"name": "adds"}
    for name in ("bind", "remote"):
        with pytest.raises(AttributeError, match=f"has no '{name}'"):
            getattr(log, name)


def test_input_is_the_argument_or_parts_of_it(rt):
    with InputNode() as given:
        whole, parts = plus.bind(given, b=given), plus.bind(given["x"], given["y"])
        named = MultiOutputNode([plus.bind(given[1]), plus.bind(given.last)])
        real = plus.bind(given.real, given.imag)
    assert fastrt.get(whole.execute(3)) == 6
    assert fastrt.get(parts.execute({"x": 1, "y": 2})) == 3
    assert fastrt.get(named.execute(1, 2, last=5)) == [3, 6]
    assert fastrt.get(real.execute(3 + 4j)) == 7


def test_graph_runs_in_local_mode(program):
    one = program(
        """
        import fastrt
        fastrt.init(local_mode=True)
        plus = fastrt.remote(lambda a, b: a + b)
        print(fastrt.get(plus.bind(plus.bind(1, 2), 3).execute()))
        """
    )
    assert one.finish()[0] == "6\n"


def test_wrong_part_of_the_input_and_compilation_are_refused():
    with InputNode() as given:
        node = plus.bind(given.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        node.execute(1, 2)
    with pytest.raises(UnsupportedError, match="does not compile graphs"):
        node.experimental_compile()
    with pytest.raises(AttributeError, match="_private"):
        _ = given._private
