"""The wall clock jumps while a coordinator serves: deadlines go by the monotonic clock."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set

# Replaces the wall clock of a process by one that is shifted by the seconds in a mapped file.
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
static volatile long long *shift;
__attribute__((constructor)) static void start(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int fd = open(getenv("SHIFT_FILE"), O_RDONLY);
    shift = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
}
int clock_gettime(clockid_t id, struct timespec *out) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, out);
    if (id == CLOCK_REALTIME && shift) out->tv_sec += *shift;
    return code;
}
int gettimeofday(struct timeval *tv, void *tz) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    tv->tv_sec = now.tv_sec;
    tv->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
_SERVE = """
import sys
from fastrt.coordination import Coordinator, CoordinatorOptions
with Coordinator(CoordinatorOptions(num_tasks=2)) as service:
    print(service.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("jump_s", [-3600, pytest.param(3600, marks=pytest.mark.long)])
def test_barrier_times_out_in_time_though_the_wall_clock_jumps(tmp_path: Path, jump_s: int) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler makes the clock that jumps")
    (tmp_path / "shim.c").write_text(_SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], check=True, timeout=60
    )
    shift = tmp_path / "shift"
    shift.write_bytes(struct.pack("<q", 0))
    env = {**os.environ, "LD_PRELOAD": str(tmp_path / "shim.so"), "SHIFT_FILE": str(shift)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        channel = open_channel(process.stdout.readline().strip())
        methods = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")

        def call(method: str, **fields: object) -> grpc.Future:
            request, response = methods[method]
            path = f"/tensorflow.CoordinationService/{method}"
            stub = channel.unary_unary(path, request.SerializeToString, response.FromString)
            return stub.future(request(**fields), timeout=60)

        tasks = [{"job_name": "jax_worker", "task_id": number} for number in (0, 1)]
        for one in [call("RegisterTask", incarnation=5, source_task=task) for task in tasks]:
            one.result()
        began = time.monotonic()
        barrier = call("Barrier", barrier_id="b", barrier_timeout_in_ms=1500, source_task=tasks[0])
        with pytest.raises(grpc.FutureTimeoutError):
            barrier.result(timeout=0.5)  # the service has gone to sleep until the deadline by now
        with shift.open("r+b") as file:
            file.write(struct.pack("<q", jump_s))
        assert barrier.exception(30).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 1.4 < time.monotonic() - began < 30
        channel.close()
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
