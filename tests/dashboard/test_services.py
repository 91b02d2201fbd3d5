"""The page of a coordinator and of parameter servers, which runs without a session."""

import numpy as np

from fastrt import ps
from fastrt.coordination import Coordinator, CoordinatorOptions, connect
from support.certificates import certificates
from support.dashboard import Dashboard

with Coordinator(CoordinatorOptions(num_tasks=1)) as _service, connect(_service.address):
    pass  # grpc opens now what it keeps open for good


def test_services_without_addresses_say_how_to_show_them(runtime_dir):
    with Dashboard(runtime_dir) as dash:
        found = dash.view("services")
        assert "--coordinator HOST:PORT" in found["no-coordinator"]["text"]
        assert "--servers HOST:PORT" in found["no-servers"]["text"]
        assert "never read from outside" in found["no-servers"]["text"]


def test_coordinator_and_tables_are_shown_and_their_end_is_noticed(runtime_dir, tmp_path, wait_until):
    with ps.start(1, http_port=0) as cluster, Coordinator(CoordinatorOptions(num_tasks=1)) as coordinator:
        rows = cluster.embedding("<b>e</b>", 2, init=0.0, optimizer=ps.SGD(lr=1.0))
        rows.push(np.arange(30), np.ones((30, 2), np.float32))
        token = tmp_path / "token"
        token.touch(0o600)
        token.write_text(cluster.token)
        servers = cluster._head.scheduler.http_address
        options = ("--coordinator", coordinator.address, "--servers", servers, "--servers-token", str(token))
        with Dashboard(runtime_dir, *options) as dash:
            wait_until(lambda: {"coordinator", "tables"} <= dash.view("services").keys(), "both services", 20)
            ((name, rank, parts, count),) = dash.view("services")["tables"]["rows"]
            assert (name, rank, parts >= 1, count) == ("<b>e</b>", "0", True, 30)
            with connect(coordinator.address):
                wait_until(
                    lambda: [row[1] for row in dash.view("services")["coordinator-tasks"]["rows"]] == ["alive"],
                    "the task",
                )
            cluster.close()
            wait_until(lambda: "servers-silent" in dash.view("services"), "the end of the servers")


def test_coordinator_that_wants_certificates_is_shown_with_one(runtime_dir, tmp_path, wait_until):
    tls = certificates(tmp_path)
    with Coordinator(CoordinatorOptions(num_tasks=1, tls=tls)) as coordinator:
        address = ("--coordinator", coordinator.address)
        named = {"ca": tls.client_ca, "cert": tls.certificate, "key": tls.key}
        files = [word for name, file in named.items() for word in (f"--coordinator-{name}", str(file))]
        with Dashboard(runtime_dir, *address) as plain, Dashboard(runtime_dir, *address, *files) as dash:
            wait_until(lambda: "coordinator" in dash.view("services"), "the coordinator", 20)
            wait_until(lambda: "coordinator-silent" in plain.view("services"), "the refusal", 20)
