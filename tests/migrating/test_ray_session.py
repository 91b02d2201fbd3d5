"""`ray.init` of `fastrt.ray`: the context that it returns, errors, and other programs in its session."""

import io
import logging
import os
import pickle
import threading

import pytest

import fastrt
from fastrt import ray
from fastrt.errors import AttachError, ConfigError
from fastrt.ray import cloudpickle
from fastrt.ray.util import annotations
from support.cluster import RunningNode


@ray.remote
class Total:
    LIMIT = 5

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def name(cls):
        return cls.__name__

    def pid(self):
        return os.getpid()


def test_context_is_a_mapping_of_addresses_and_ends_the_session(program):
    one = program(
        """
        import os
        from fastrt import ray
        with ray.init(num_cpus=1, object_store_memory=64 << 20, labels={"zone": "a"}) as context:
            assert context["node_id"] == context.address_info["node_id"] == ray.nodes()[0]["NodeID"]
            assert dict(context) == context.address_info and len(context) == len(context.address_info)
            assert os.path.samefile(os.path.dirname(context["address"]), context["session_dir"])
            assert ray.get_runtime_context().get_node_labels()["zone"] == "a"
            assert ray.get_runtime_context().get_dashboard_url() == context.dashboard_url == ""
            assert {"GPU", "TPU", "FURIOSA"} <= set(ray.get_runtime_context().get_accelerator_ids())
            assert ray.nodes()[0]["alive"] and ray.nodes()[0]["NodeManagerAddress"] == context["node_ip_address"]
            assert ray.nodes()[0].get("NodeManagerPort") is None
            try:
                ray.nodes()[0]["NodeManagerPort"]
            except ray.exceptions.RayError as exc:
                assert "has no field 'NodeManagerPort' of nodes()" in str(exc), exc
            else:
                raise AssertionError("no error")
            from fastrt.ray.util.multiprocessing import Pool
            with Pool(1, ray_address="auto") as pool:
                assert pool.map(abs, [-1]) == [1]
            try:
                Pool(2)
            except ValueError as exc:
                assert "from 1 to the number of CPUs, 1" in str(exc)
            ray.get(ray.remote(lambda: None).remote())  # the function lies in the store, too
            part = "object_store_memory"
            assert ray.available_resources()[part] == ray.cluster_resources()[part] == 64 << 20
            assert ray.util.placement_group([{"CPU": 1}], strategy=None).strategy == "PACK"
            assert ray.init(ignore_reinit_error=True)["node_id"] == context["node_id"]
            try:
                ray.init()
            except RuntimeError as exc:
                assert "ray.shutdown()" in str(exc)
            @ray.remote
            def inside():
                return ray.init(ignore_reinit_error=True)["node_id"]
            assert ray.get(inside.remote()) == context["node_id"]
            assert context.ray_version == ray.__version__ and "node_id" in repr(context)
        assert not ray.is_initialized()
        context = ray.init(local_mode=True, include_dashboard=True, dashboard_port=1)
        assert context["node_id"] == "" and context.dashboard_url == ""
        context.disconnect()
        print(ray.is_initialized())
        """
    )
    assert one.finish()[0] == "False\n"


def test_another_program_joins_a_session_by_its_address_and_leaves_it(program):
    first = program(
        """
        from fastrt import ray
        context = ray.init(num_cpus=1, object_store_memory=64 << 20, namespace="both")
        @ray.remote
        class Kept:
            def add(self, x):
                self.value = getattr(self, "value", 0) + x
                return self.value
        kept = Kept.options(name="kept").remote()
        assert ray.get(kept.add.remote(1)) == 1
        print(context["address"], flush=True)
        input_end = __import__("time").monotonic() + 30
        while ray.get(kept.add.remote(0)) < 10 and __import__("time").monotonic() < input_end:
            pass
        print("got", ray.get(kept.add.remote(0)))
        """
    )
    address = first.wait_for_line("/").strip()
    second = program(
        f"""
        from fastrt import ray
        with ray.init({address!r}, namespace="both") as context:
            assert context["address"] == {address!r} and context.runtime.num_workers == 1
            task = ray.remote(lambda x: x + 1)
            print(ray.get(task.remote(1)), ray.get(ray.get_actor("kept").add.remote(9)))
        """
    )
    assert second.finish()[0] == "2 10\n"
    assert "got 10" in first.finish()[0]


def test_address_of_no_session_is_refused(tmp_path):
    with pytest.raises(AttachError):
        fastrt.init(address=str(tmp_path / "none.sock"))
    with pytest.raises(ConnectionError, match=r"none\.sock"):
        ray.init(str(tmp_path / "none.sock"))
    with pytest.raises(ConfigError, match="settings of the node, which runs already: num_workers; give"):
        ray.init(str(tmp_path / "none.sock"), num_cpus=2)
    with pytest.raises(ConfigError, match="already: spill_dir, logging; give"):
        fastrt.init(address=str(tmp_path / "none.sock"), spill_dir=tmp_path, logging="DEBUG", advice=False)
    assert not fastrt.is_initialized()


@pytest.mark.parametrize("name", ["_system_config", "_node_name", "_enable_object_reconstruction"])
def test_settings_of_a_node_are_refused_beside_the_address_of_one_that_runs(name):
    with pytest.raises(ValueError, match=f"settings of the node, which runs already: {name}"):
        ray.init("127.0.0.1:1", **{name: {"object_timeout_milliseconds": 200}})


def test_attributes_of_an_actor_class_are_those_of_its_class():
    assert (Total.LIMIT, Total.twice(4), Total.name()) == (5, 8, "Total")
    with pytest.raises(AttributeError, match="nothing"):
        _ = Total.nothing
    again = pickle.loads(cloudpickle.dumps(Total))
    assert again.twice(1) == 2
    assert not hasattr(Total, "__array__")


def test_pickling_for_debugging_says_which_part_cannot_be_pickled(monkeypatch, capsys):
    lock = threading.Lock()

    def takes():
        return lock

    monkeypatch.delenv("RAY_PICKLE_VERBOSE_DEBUG", raising=False)
    for fails in (lambda: cloudpickle.dumps_debug(takes), lambda: cloudpickle.dump_debug(takes, io.BytesIO())):
        with pytest.raises(TypeError, match=r"(?s)ray.cloudpickle.dumps?\(.*takes.*lock.*RAY_PICKLE_VERBOSE_DEBUG=1"):
            fails()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RAY_PICKLE_VERBOSE_DEBUG", "1")
    with pytest.raises(TypeError, match="cannot pickle"):
        cloudpickle.dumps_debug(takes)
    assert "lock: <unlocked _thread.lock" in capsys.readouterr().out
    file = io.BytesIO()
    cloudpickle.dump_debug([1], file, protocol=5)
    assert pickle.loads(file.getvalue()) == cloudpickle.loads(cloudpickle.dumps_debug([1])) == [1]


def test_logging_config_writes_lines_of_text_or_json(capsys):
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    try:
        ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"]).apply()
        logging.getLogger("a name").info("hello %s", "you")
        ray.LoggingConfig.from_dict({"log_level": "WARNING"}).apply()
        logging.getLogger("b").info("not shown")
        logging.getLogger("b").warning("shown")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    said = capsys.readouterr().err
    assert '"message": "hello you"' in said
    assert '"name": "a name"' in said
    assert "-- shown" in said
    assert "not shown" not in said
    with pytest.raises(ValueError, match="encoding is 'XML'"):
        ray.LoggingConfig(encoding="XML")


def test_marks_of_stability_return_what_they_mark():
    assert annotations.PublicAPI(len) is annotations.DeveloperAPI(stability="beta")(len) is len


def test_init_without_an_address_joins_the_node_that_runs_here(program, runtime_dir):
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "1", "--name", "one")
    code = f"""
        import os
        from fastrt import ray
        os.environ["FASTRT_RUNTIME_DIR"] = {str(runtime_dir)!r}
        for variables in ({{}}, {{"RAY_ADDRESS": {node.head!r}}}, {{"RAY_ADDRESS": "auto"}},
                          {{"RAY_ADDRESS": {node.head.replace("127.0.0.1", "localhost")!r}}}):
            os.environ.update(variables)
            with ray.init() as context:
                assert context["node_id"].startswith({node.note.session!r}), context
        try:
            ray.init(num_cpus=1)
        except ValueError as exc:
            assert "num_workers; give them to `fastrt start`" in str(exc), exc
        os.environ["RAY_ADDRESS"] = {node.head!r}
        ray.get(ray.put(1))
        assert ray.get_runtime_context().get_node_id().startswith({node.note.session!r})
        ray.shutdown()
        os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
        try:
            ray.put(1)
        except ConnectionError as exc:
            assert "127.0.0.1:1" in str(exc), exc
        try:
            ray.init()
        except ConnectionError as exc:
            assert "127.0.0.1:1" in str(exc), exc
        with ray.init("local", num_cpus=1, object_store_memory=64 << 20, _skip_env_hook=True) as context:
            assert ray.get(ray.remote(lambda: ray.get_runtime_context().actor_id).remote()) is None
            assert context["node_id"] != {node.note.session!r}
        print("done")
    """
    try:
        assert program(code).finish()[0] == "done\n"
    finally:
        node.stop()


def test_auto_joins_the_session_of_another_program(program):
    """The latest one that runs; a program that gives no address starts one of its own."""
    one = program(
        """
        import os, subprocess, sys
        from fastrt import ray

        INNER = (
            "import sys\\n"
            "from fastrt import ray\\n"
            "context = ray.init(*sys.argv[1:], namespace='shared')\\n"
            "print(context['node_id'], *ray.util.list_named_actors())\\n"
        )
        @ray.remote
        class Total:
            def add(self, value):
                return value + 1

        def joined(*address):
            return subprocess.run([sys.executable, "-c", INNER, *address], capture_output=True, text=True)

        assert "fastrt start --head" in joined("auto").stderr
        with ray.init(num_cpus=1, object_store_memory=64 << 20):
            pass
        with ray.init(num_cpus=1, object_store_memory=64 << 20, namespace="shared") as context:
            actor = Total.options(name="total").remote()
            assert joined("auto").stdout == f"{context['node_id']} total\\n"
            assert context["node_id"] not in joined().stdout
            assert ray.get(actor.add.remote(1)) == 2
        print("done")
        """
    )
    assert one.finish()[0] == "done\n"


def test_a_session_without_cpus_runs_actors_and_tasks_that_ask_for_none(program):
    one = program(
        """
        from fastrt import ray
        with ray.init(num_cpus=0, resources={"special": 1}, object_store_memory=64 << 20):
            assert "CPU" not in ray.cluster_resources() and ray.cluster_resources()["special"] == 1
            waits = ray.remote(lambda: 3).remote()
            assert ray.wait([waits], timeout=0.1)[0] == []
            assert ray.get(Total.options(resources={"special": 1}).remote().pid.remote()) > 0
            free = ray.remote(lambda: 5).options(num_cpus=0)
            assert ray.get([free.remote() for _ in range(4)]) == [5] * 4
            print("done")
        """.replace("Total", "ray.remote(type('Total', (), {'pid': lambda self: __import__('os').getpid()}))")
    )
    assert one.finish()[0] == "done\n"


def test_logs_of_the_state_api_are_the_kept_output(program):
    one = program(
        """
        import os, sys
        from fastrt import ray
        from fastrt.ray.util import state
        class Speaker:
            def say(self, text):
                print(text, flush=True)
                print("aside", file=sys.stderr, flush=True)
                return os.getpid()
            def stay(self, stop):
                while not os.path.exists(stop):
                    pass
        def wait_for(read, wanted):
            import time
            until = time.monotonic() + 30
            while (found := read()) != wanted and time.monotonic() < until:
                pass
            assert found == wanted, found
        with ray.init(num_cpus=1, object_store_memory=64 << 20, log_to_driver=False) as context:
            node = context["node_id"]
            speaker = ray.remote(Speaker).remote()
            pid = ray.get(speaker.say.remote("one"))
            ray.get(speaker.say.remote("\x1b[1mtwo"))
            wait_for(lambda: list(state.get_log(pid=pid, filter_ansi_code=True)), ["one\\n", "two\\n"])
            file = f"worker-{pid}.out"
            wait_for(lambda: state.list_logs(node_id=node, glob_filter=f"*-{pid}.out"), {"worker_out": [file]})
            assert list(state.get_log(filename=file, node_id=node, tail=1)) == ["\x1b[1mtwo\\n"]
            assert list(state.get_log(pid=pid, tail=1, encoding=None)) == [b"\x1b[1mtwo\\n"]
            actor = speaker._actor_id.hex()
            at = {"suffix": "err", "node_ip": context["node_ip_address"]}
            wait_for(lambda: list(state.get_log(actor_id=actor, **at)), ["aside\\n"] * 2)
            stop = os.path.join(context["session_dir"], "stop")
            def wait():
                print("waits", flush=True)
                while not os.path.exists(stop):
                    pass
            ref = ray.remote(wait).remote()
            wait_for(lambda: list(state.get_log(task_id=ref.task_id())), ["waits\\n"])
            call = speaker.stay.remote(stop)
            assert [one.actor_id for one in state.list_tasks(filters=[("type", "=", "actor_task")])] == [actor]
            open(stop, "w").close()
            ray.get([ref, call])
            others = {"filename": "raylet.out"}, {"pid": pid, "suffix": "log"}, {"pid": 1, "node_id": "ff"}
            for wrong in ({}, {"actor_id": "ff"}, *others):
                try:
                    list(state.get_log(**wrong))
                except ValueError:
                    continue
                raise AssertionError(wrong)
            try:
                state.list_logs()
            except ValueError as exc:
                print(exc)
        try:
            ray.experimental.get_object_locations([])
        except RuntimeError as exc:
            print(exc)
        """
    )
    assert one.finish()[0] == "give node_id or node_ip\nget_object_locations needs a session: call ray.init() first\n"


def test_memory_is_rounded_down_and_accelerators_have_their_type(program):
    one = program(
        """
        from fastrt import ray
        with ray.init(num_cpus=1, object_store_memory=64 << 20, _memory=2.2, resources={"neuron_cores": 2}):
            assert ray.cluster_resources()["memory"] == 2
            assert ray.cluster_resources()["accelerator_type:aws-neuron-core"] == 1
            old = ray.put(1)
        with ray.init(num_cpus=2.0, object_store_memory=70e6 + 0.5, _memory=0.2):
            assert ray.cluster_resources()["object_store_memory"] == 70_000_000
            assert ray.cluster_resources()["CPU"] == 2
            assert ray.get(ray.remote(memory=0.5)(lambda: 1).remote(), timeout=30) == 1
            try:
                ray.get(old)
            except ValueError as exc:
                assert "a session that has ended" in str(exc)
            else:
                raise AssertionError("no error")
        """
    )
    one.finish()


def test_system_config_sets_the_threshold_of_memory_and_private_functions_say_what_is_used(program):
    one = program(
        """
        from fastrt import ray
        from fastrt.ray._private import internal_api, utils
        from fastrt.ray._private.ray_constants import RESOURCE_CONSTRAINT_PREFIX
        for name in ("memory_usage_threshold", "max_lineage_bytes"):
            try:
                ray.init(_system_config={name: -1})
            except ValueError as exc:
                print(str(exc).split("=")[0])
        assert 0 < utils.get_used_memory() < utils.get_system_memory()
        with ray.init(
            num_cpus=1, resources={RESOURCE_CONSTRAINT_PREFIX + "V100": 1},
            _system_config={"memory_usage_threshold": 0.99, "max_lineage_bytes": 1 << 20, "anything": 1},
        ):
            print(ray.get(ray.remote(accelerator_type="V100")(lambda: "ran").remote(), timeout=60))
            kept = ray.put(b"x" * 1_000_000)
            said = internal_api.memory_summary()
            assert f"held by {__import__('os').getpid()} (1)" in said and "976.6 KiB" in said, said
            assert internal_api.memory_summary(stats_only=True) == said.splitlines()[-1]
            assert internal_api.memory_summary(num_entries=0) == said.splitlines()[-1]
        """
    )
    assert one.finish()[0] == "memory_threshold\nlineage_bytes\nran\n"


def test_job_config_gives_namespace_environment_folders_and_lifetime(program, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "found_by_path.py").write_text("VALUE = 5\n")
    one = program(
        """
        import os, threading
        from fastrt import ray
        from fastrt.ray.job_config import JobConfig
        from fastrt.ray.util.state import list_actors

        @ray.remote
        def look():
            import found_by_path
            return found_by_path.VALUE, os.environ["COLOUR"], ray.get_runtime_context().namespace

        @ray.remote
        class Child:
            def here(self):
                return True

        @ray.remote(lifetime="non_detached")
        class Owner:
            def make(self, lifetime):
                return ray.get(Child.options(lifetime=lifetime, name=f"child-{lifetime}").remote().here.remote())

        folder = os.environ["FOLDER"]
        config = JobConfig(code_search_path=[folder, "/no/such/folder"], metadata={"a": "b"}, ray_namespace="ours",
                           default_actor_lifetime="detached")
        config.set_runtime_env({"env_vars": {"COLOUR": "blue"}}, validate=True)
        config.set_metadata("c", "d")
        assert config.metadata == {"a": "b", "c": "d"}
        settings = {"num_cpus": 1, "object_store_memory": 64 << 20}
        with ray.init(**settings, job_config=config):
            assert ray.get(look.remote(), timeout=30) == (5, "blue", "ours")
            Child.options(name="mine").remote()
            owner = Owner.remote()
            assert ray.get([owner.make.remote(lifetime) for lifetime in (None, "non_detached")], timeout=30)
            del owner
            while {row.name for row in list_actors(filters=[("state", "=", "ALIVE")])} != {"mine", "child-None"}:
                threading.Event().wait(0.01)
            assert ray.get([ray.get_actor(name).here.remote() for name in ("mine", "child-None")], timeout=30)
        config = JobConfig.from_json({"ray_namespace": "ours", "runtime_env": {"env_vars": {"COLOUR": "red"}}})
        own = {"env_vars": {"COLOUR": "green"}, "import_paths": [folder]}
        with ray.init(**settings, namespace="mine", job_config=config, runtime_env=own):
            assert ray.get(look.remote(), timeout=30) == (5, "green", "mine")
        for wrong in ({"default_actor_lifetime": "long"}, {"jvm_options": ["-X"]}, {"code_search_path": folder}):
            try:
                JobConfig(**wrong)
            except Exception as exc:
                print(type(exc).__name__)
        """,
        FOLDER=str(tmp_path / "code"),
    )
    assert one.finish()[0].split() == ["ValueError", "UnsupportedError", "TypeError"]


def test_program_without_a_namespace_has_one_of_its_own(program):
    one = program(
        """
        import subprocess, sys
        from fastrt import ray

        class Named:
            def space(self):
                return ray.get_runtime_context().namespace

        with ray.init(num_cpus=1, object_store_memory=64 << 20) as context:
            space = ray.get_runtime_context().namespace
            assert len(space) == 36, space
            actor = ray.remote(Named).options(name="n" * 140).remote()
            assert ray.get(actor.space.remote(), timeout=30) == space
            assert ray.get(ray.remote(lambda: ray.get_runtime_context().namespace).remote(), timeout=30) == space
            assert ray.get(ray.get_actor("n" * 140, namespace=space).space.remote(), timeout=30) == space
            assert ray.util.list_named_actors() == ["n" * 140]
            code = f"from fastrt import ray; ray.init({context['address']!r}); print(ray.util.list_named_actors()); " \\
                   "print(ray.get_runtime_context().namespace)"
            done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
            names, other = done.stdout.splitlines()
            assert names == "[]" and len(other) == 36 and other != space, done.stdout
            print("done")
        """
    )
    assert one.finish()[0] == "done\n"


@pytest.mark.parametrize("value", ["0", "1"])
def test_equal_lines_are_printed_each_or_folded(program, value):
    one = program(
        """
        import os
        from fastrt import ray
        os.environ["RAY_DEDUP_LOGS"] = os.environ["VALUE"]
        with ray.init(num_cpus=1, object_store_memory=64 << 20):
            ray.get([ray.remote(print).remote("the same") for _ in range(5)], timeout=30)
        """,
        VALUE=value,
    )
    output = "".join(one.finish())
    assert (output.count("the same") == 5) == (value == "0"), output


def test_variables_of_ray_change_the_node(program, runtime_dir):
    one = program(
        """
        import json, os
        from fastrt import ray
        folder = os.environ["FOLDER"]
        for variable, options in (("RAY_TMPDIR", {}), ("NOTHING", {"_temp_dir": folder})):
            del os.environ["FASTRT_RUNTIME_DIR"]
            os.environ[variable] = folder
            with ray.init("local", num_cpus=1, object_store_memory=64 << 20, **options) as context:
                assert context["session_dir"].startswith(folder + "/fastrt-"), context["session_dir"]
            os.environ["FASTRT_RUNTIME_DIR"] = os.environ["RUNTIME"]
            del os.environ[variable]
        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 2, "seat": 3, "memory": 1 << 20})
        with ray.init(num_cpus=1, resources={"seat": 1, "book": 4}, object_store_memory=64 << 20):
            found = ray.cluster_resources()
            assert [found[name] for name in ("CPU", "seat", "book", "memory")] == [2, 3, 4, 1 << 20], found
        for wrong in ("{", "5"):
            os.environ["RAY_OVERRIDE_RESOURCES"] = wrong
            try:
                ray.init(num_cpus=1, object_store_memory=64 << 20)
            except ValueError as exc:
                assert "RAY_OVERRIDE_RESOURCES" in str(exc)
            else:
                raise AssertionError(wrong)
        del os.environ["RAY_OVERRIDE_RESOURCES"]
        context = ray.get_runtime_context
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        for call in (lambda: ray.put(1), ray.remote(lambda: 1).remote, context):
            try:
                call()
            except ray.exceptions.RaySystemError as exc:
                assert "Ray has not been started yet" in str(exc)
            else:
                raise AssertionError(call)
        with ray.init(num_cpus=1, object_store_memory=64 << 20):
            here = context()
        try:
            here.get_job_id()
        except RuntimeError as exc:
            print(exc)
        """,
        FOLDER=str(runtime_dir.parent),
        RUNTIME=str(runtime_dir),
    )
    assert one.finish()[0] == "Job ID is not available because Ray has not been initialized.\n"
