"""2,000 hostile connections at each door of gRPC, with calls of a client beside them.

    python bench/campaign_doors.py [CONNECTIONS] [DOOR...]

Each door is a process of its own. For each kind of attack the client makes 100 calls before it and 100 during it. One
line is printed for each: how many calls failed, p50 and p99 quiet and under attack, and the door's memory before, at
its peak and 15 s after. The attackers send 10 Mbit/s together: more only takes the processor from the door on a
machine of two cores.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc

HOSTILE = Path(__file__).with_name("hostile.py")
KINDS = ("silent", "preface", "settings", "streams", "reset", "headers", "continuation", "pings", "drip", "unread")
TOKEN = "t" * 64
CALLS = 100
ATTACK_S = 10.0
AFTER_S = 15.0
# Bytes a second of all attackers together.
RATE = 1_250_000


def serve(door: str) -> None:
    """Serve one door until standard input ends."""
    stop: Any = None
    if door == "coordinator":
        from fastrt.coordination import Coordinator, CoordinatorOptions

        stop = Coordinator(CoordinatorOptions())
    elif door == "scheduler":
        from fastrt.scheduler.service import Scheduler, SchedulerOptions

        stop = Scheduler(SchedulerOptions(token=TOKEN))
    else:
        raise SystemExit(f"unknown door {door}")
    stop.start()
    print(stop.address, flush=True)
    sys.stdin.read()
    stop.stop()


class Client:
    """Calls of a client that is let in."""

    def __init__(self, door: str, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        path, self._body = {
            "coordinator": ("/tensorflow.CoordinationService/TryGetKeyValue", b"\n\x01a"),
            "scheduler": ("/Scheduler/SchedulerInfo", b""),
        }[door]
        self._call = self._channel.unary_unary(path)

    def measure(self) -> tuple[int, float, float]:
        """Failures, p50 and p99 (ms) of 100 calls."""
        times, failures = [], 0
        for _ in range(CALLS):
            began = time.perf_counter()
            try:
                self._call(self._body, timeout=10, metadata=(("authorization", f"Bearer {TOKEN}"),))
            except grpc.RpcError as error:
                failures += error.code() is not grpc.StatusCode.NOT_FOUND
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.02)
        times.sort()
        return failures, times[CALLS // 2], times[CALLS * 99 // 100 - 1]

    def close(self) -> None:
        self._channel.close()


class Memory:
    """Resident memory of a process in MiB, and its peak while this is watched."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/statm")
        self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def now(self) -> float:
        return int(self._status.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, self.now())


def campaign(door: str, kind: str, count: int) -> None:
    """Print one line: a door under one attack."""
    words = [sys.executable, __file__, "--serve", door]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    client, memory = Client(door, address), Memory(process.pid)
    client.measure()
    _, quiet50, quiet99 = client.measure()
    before = memory.now()
    told = [sys.executable, str(HOSTILE), kind, address, str(count), str(ATTACK_S), "/none/none", "inf", str(RATE)]
    attack = subprocess.Popen(told, stdout=subprocess.PIPE, text=True)
    assert attack.stdout is not None
    attack.stdout.readline()
    failures, under50, under99 = client.measure()
    result = json.loads(attack.communicate()[0].strip() or "{}")
    time.sleep(AFTER_S)
    print(
        f"{door:12} {kind:13} failed {failures}/{CALLS}  p50 {quiet50:.2f} -> {under50:.2f} ms  "
        f"p99 {quiet99:.2f} -> {under99:.2f} ms  MiB {before:.0f}, peak {memory.peak:.0f}, after {memory.now():.0f}  "
        f"({result.get('opened')} opened, {result.get('closed')} ended)",
        flush=True,
    )
    memory.stop()
    client.close()
    process.communicate()


def main() -> None:
    """Run the campaign, or serve a door for it."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for door in sys.argv[2:] or ("coordinator", "scheduler"):
        for kind in KINDS:
            campaign(door, kind, count)


if __name__ == "__main__":
    main()
