"""Two JAX processes on one machine that sum an array across each other, coordinated by fastrt.

    python examples/jax_two_processes.py

needs `pip install fastrt jax`. The parent starts a fastrt coordinator and the two processes; they use JAX's own
`jax.distributed`, which does not notice that the service is another one.
"""

import os
import subprocess
import sys

PROCESSES = 2


def work(address: str, process_id: int) -> None:
    """One of the JAX processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    # JAX's process 0 starts a service of its own inside `jax.distributed.initialize`. On our port it would clash with
    # ours, so it gets a port without clients: all clients, that of process 0 too, connect to `address`.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=PROCESSES,
        process_id=process_id,
        coordinator_bind_address="127.0.0.1:0",
    )
    mesh = jax.make_mesh((PROCESSES,), ("process",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    local = np.arange(4, dtype=np.int32) + 4 * process_id  # 0..3 in one process, 4..7 in the other
    whole = jax.make_array_from_process_local_data(sharding, local)
    total = int(jax.jit(jnp.sum)(whole))  # each process has half of the array; Gloo adds the halves
    print(f"process {jax.process_index()} of {jax.process_count()}: the sum over both is {total}", flush=True)
    jax.distributed.shutdown()


def main() -> int:
    """Start the coordinator and both processes; returns 0 when all went well."""
    from fastrt.coordination import Coordinator, CoordinatorOptions

    with Coordinator(CoordinatorOptions(num_tasks=PROCESSES)) as coordinator:
        print(f"fastrt coordinator on {coordinator.address}", flush=True)
        # fastrt is needed here only; the processes may run in an environment that has JAX and no fastrt.
        python = os.environ.get("JAX_PYTHON", sys.executable)
        workers = [
            subprocess.Popen([python, __file__, coordinator.address, str(process_id)])
            for process_id in range(PROCESSES)
        ]
        return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
