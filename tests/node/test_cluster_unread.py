"""Errors of tasks and actors on another node that nothing reads."""

import pytest


@pytest.mark.long
def test_errors_of_another_node_that_nothing_reads_are_printed_where_the_program_runs(
    runtime_dir, start, program, tmp_path
):
    stop = tmp_path / "stop"
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    start("--address", head.head, "--num-workers", "2", "--name", "two")
    one = program(
        f"""
        import os, threading
        import fastrt

        @fastrt.remote(scheduling="two", max_retries=0)
        def fail(text):
            raise ValueError(text)

        @fastrt.remote(scheduling="two")
        class Actor:
            def __init__(self, fails=False):
                if fails:
                    raise ValueError("not built")

            def fail(self):
                raise ValueError("in a method")

        with fastrt.init(address={head.head!r}, runtime_dir={str(runtime_dir)!r}):
            while len(fastrt.nodes()) < 2:
                threading.Event().wait(0.01)
            fail.remote("dropped at once")
            held = fail.remote("held")
            fastrt.wait([held], timeout=30)
            actor = Actor.remote()
            called = actor.fail.remote()
            fastrt.wait([called], timeout=30)
            del called
            for ref in (fail.remote("read"), fail.remote("read, too")):
                try:
                    fastrt.get(ref, timeout=30)
                except ValueError:
                    pass
            print("done", flush=True)
            while not os.path.exists({str(stop)!r}):
                threading.Event().wait(0.01)
        """
    )
    one.wait_for_line("done")
    seen = ""
    # The third one is still held, and printed at the end.
    while not all(f"ValueError: {word}\n" in seen for word in ("dropped at once", "in a method")):
        line = one.process.stderr.readline()
        assert line, seen
        seen += line
    stop.touch()
    seen += one.finish()[1]
    assert seen.count("ValueError: dropped at once") == 1, seen
    assert seen.count("ValueError: held") == 1, seen
    assert seen.count("ValueError: in a method") == 1, seen
    assert "ValueError: read" not in seen
