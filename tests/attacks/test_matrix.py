"""Every door and every attack: a table without an empty cell.

FASTRT_ATTACKS_TABLE names a file for the table; `-s` prints it.
"""

import base64
import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrt.net.grpc.identity import new_token
from support.attacks import speak
from support.attacks.attacker import Attacker
from support.attacks.folder_gates import FOLDERS, Folder
from support.attacks.gates import DOORS as PORTS
from support.attacks.gates import Door

# The first cell of a door also starts its services.
pytestmark = pytest.mark.timeout(120)
GROWTH_BYTES_MAX = 64 << 20
DESCRIPTORS_MAX = 40  # more than before, 15 s after an attack
BACK_S = 15.0
WRONG = new_token()

DOORS = [*PORTS, *FOLDERS]
TABLE: dict[tuple[str, str], str] = {}

# ---- attacks by bytes: each is code of a hostile process, which says "ready" when it has begun ----

SILENT = """
socks = []
for k in range(given["count"]):
    try:
        socks.append(connect(address))
    except OSError:
        break
    if k % 2:
        shout(socks[-1], opening)
ready(); wait()
"""
SLOW = """
socks = []
for _ in range(10):
    try:
        socks.append(connect(address))
    except OSError:
        break
ready()
for byte in range(len(opening) or 20):
    for sock in socks:
        shout(sock, opening[byte:byte + 1] or b"x")
    pause(0.004)
wait()
"""
FLOOD = """
import threading
def one():
    for k in range(given["count"]):
        try:
            sock = connect(address)
        except OSError:
            continue
        shout(sock, opening, bytes(k % 512))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
threads = [threading.Thread(target=one) for _ in range(4)]
for thread in threads: thread.start()
ready()
for thread in threads: thread.join()
wait()
"""
GARBAGE = """
ready()
for k in range(40):
    try:
        sock = connect(address)
    except OSError:
        continue
    kinds = (b"", opening, b"\\x16\\x03\\x01\\x02\\x00\\x01", b"GET / HTTP/1.1\\r\\n", b"\\xff" * 64)
    shout(sock, kinds[k % len(kinds)], random.randbytes(random.randrange(2000)))
    sock.close()
wait()
"""
BLOB = """
socks = []
for _ in range(8):
    try:
        socks.append(connect(address))
    except OSError:
        break
for sock in socks:
    sock.settimeout(0.2)
    shout(sock, base64.b64decode(given["blob"]), given["filler"].encode() * given["more"])
ready(); wait()
"""
OTHER_USER = """
heard = b""
try:
    sock = connect(address)
    shout(sock, opening, b"\\n")
    heard = listen(sock, 0.3)
except OSError as error:
    report["refused"] = str(error)
report["heard"] = base64.b64encode(heard).decode()
"""
REPLAY = """
sock = connect(address)
for piece in given["pieces"]:
    shout(sock, base64.b64decode(piece))
    pause(0.02)
report["heard"] = base64.b64encode(listen(sock, 0.3)).decode()
"""
# Listens where a service is awaited, and takes down all that comes; gRPC clients get the settings they wait for.
SQUAT = """
if given["name"]:
    server = socket.socket(socket.AF_UNIX, given["type"])
    server.bind("\\0" + given["name"][1:] if given["name"].startswith("@") else given["name"])
    if given["name"].startswith("/"): os.chmod(given["name"], 0o777)
    server.listen(64); port = 0
else:
    server = socket.create_server((b"127.0.0.1", 0)); port = server.getsockname()[1]
heard = []
def hear(sock):
    sock.settimeout(0.1)
    first = True
    while True:
        try:
            piece = sock.recv(65536)
        except TimeoutError:
            if stop: return
            continue
        except OSError:
            return
        if not piece: return
        heard.append(piece)
        if first and piece.startswith(b"PRI"):
            shout(sock, b"\\0\\0\\0\\4\\0\\0\\0\\0\\0\\0\\0\\0\\4\\1\\0\\0\\0\\0")
        first = False
stop = False
def serve():
    while True:
        try: sock, _ = server.accept()
        except OSError: return
        threading.Thread(target=hear, args=(sock,), daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
print("ready", port, flush=True)
wait(); stop = True; pause(0.1)
report["heard"] = base64.b64encode(b"".join(heard)).decode()
"""


class Cell:
    """One attack on one door."""

    def __init__(self, door: Door, attack: Callable[..., Attacker], uid: int | None) -> None:
        self.door, self.attack, self.uid = door, attack, uid

    def launch(self, code: str, **given: object) -> Attacker:
        """A hostile process at the door, as another user if that is possible."""
        opening = base64.b64encode(self.door.opening).decode()
        more = {"uid": self.uid, "type": self.door.kind, "address": self.door.address, "opening": opening}
        return self.attack(code, **{**more, **given})

    def bytes_attack(self, code: str, **given: object) -> str:
        """A right client is served while it goes on, and afterwards."""
        attacker = self.launch(code, **given)
        attacker.ready()
        self.door.right()
        attacker.finish()
        self.door.right()
        return "right clients were served"

    def no_secret(self) -> str:
        """See its name."""
        with pytest.raises(speak.RefusedError) as refused:
            self.door.enter(self.door.address, None)
        return f"refused: {str(refused.value)[:80]}"

    def wrong_secret(self) -> str:
        """See its name."""
        with pytest.raises(speak.RefusedError) as refused:
            self.door.enter(self.door.address, WRONG)
        return f"refused: {str(refused.value)[:80]}"

    def replayed(self) -> str:
        """A relay records a right client, and a stranger says the same once more."""
        with Relay(self.door.address) as relay:
            self.door.dial(relay.address)
        assert relay.said, "the relay recorded nothing"
        pieces = [base64.b64encode(piece).decode() for piece in relay.said]
        heard = base64.b64decode(self.launch(REPLAY, pieces=pieces).finish()["heard"])
        self.door.check_replay(relay.said, relay.heard, heard)
        return f"of {sum(map(len, relay.said))} recorded bytes none opened it"

    def other_uid(self) -> str:
        """Another user of the machine gets nothing."""
        if isinstance(self.door, Folder):
            return self.door.other_uid(self.attack, self.uid)
        report = self.launch(OTHER_USER).finish()
        heard = base64.b64decode(report["heard"])
        for part in secrets_of(self.door.secret):
            assert part not in heard
        assert len(heard) < 1024, heard
        return f"got {len(heard)} bytes, no secret" if heard else report.get("refused", "hung up on")

    def squatted_port(self) -> str:
        """Another user listens where a right client dials: it gets neither the secret nor a pickle."""
        squatter = self.launch(SQUAT, name=self.door.squat_at())
        port = squatter.ready()
        self.door.dial(self.door.squat_at() or f"127.0.0.1:{port}")
        heard = base64.b64decode(squatter.finish()["heard"])
        # Who listens on a Unix socket is known before a byte is sent; over TCP the other end has to be asked.
        assert bool(heard) is not bool(self.door.squat_at()), heard
        for part in secrets_of(self.door.secret):
            assert part not in heard, f"{self.door.name} sends its secret to whoever listens"
        # A pickle's first frame, and its length below 4 GiB: three bytes alone are among random ones now and then.
        assert not re.search(rb"\x80[\x04\x05]\x95.{4}\x00{4}", heard, re.DOTALL)
        return f"heard {len(heard)} bytes, no secret and no pickle"

    def silent(self) -> str:
        """See `SILENT`."""
        return self.bytes_attack(SILENT, count=150)

    def slow(self) -> str:
        """See `SLOW`."""
        return self.bytes_attack(SLOW)

    def flood(self) -> str:
        """See `FLOOD`."""
        return self.bytes_attack(FLOOD, count=75)

    def garbage(self) -> str:
        """See `GARBAGE`."""
        return self.bytes_attack(GARBAGE)

    def oversized(self) -> str:
        """More than the door can want."""
        return self.bytes_attack(BLOB, blob=base64.b64encode(self.door.oversized).decode(), more=1 << 20, filler="x")

    def nested(self) -> str:
        """Deeper than a reader could go."""
        return self.bytes_attack(BLOB, blob=base64.b64encode(self.door.nested).decode(), more=0, filler="")

    def squatted_folder(self) -> str:
        """Only where a door lies in a folder."""
        return self.door.squatted_folder(self.uid)


ATTACKS: dict[str, Callable[[Cell], str]] = {
    "no secret": Cell.no_secret,
    "wrong secret": Cell.wrong_secret,
    "right secret replayed": Cell.replayed,
    "other uid": Cell.other_uid,
    "squatted port": Cell.squatted_port,
    "squatted folder": Cell.squatted_folder,
    "silent": Cell.silent,
    "slow": Cell.slow,
    "flood": Cell.flood,
    "garbage": Cell.garbage,
    "oversized": Cell.oversized,
    "deep nesting": Cell.nested,
}


class Relay:
    """Passes bytes on both ways, and records them."""

    def __init__(self, address: str) -> None:
        self.said: list[bytes] = []
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = address
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection((host, int(port)))
                self._socks += [here, there]
                for source, sink, kept in ((here, there, self.said), (there, here, self.heard)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink, kept)))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                kept.append(piece)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


def secrets_of(token: str) -> Iterator[bytes]:
    """A secret in every form in which it could be sent."""
    for part in [token, *token.split("-")]:
        if len(part) >= 16:
            yield part.encode()
            with contextlib.suppress(ValueError):
                yield bytes.fromhex(part)


@pytest.fixture
def cell(runtime, attack, request) -> Iterator[Cell]:
    door = request.param(runtime)
    door.begin()
    process = door.process()
    memory, descriptors = process.memory_info().rss, process.num_fds()
    yield Cell(door, attack, request.getfixturevalue("other_uid") if os.getuid() == 0 else None)
    door.end()
    assert process.is_running(), f"{door.name}: its process has ended"
    pause, waited = threading.Event(), 0.0
    while process.num_fds() > descriptors + DESCRIPTORS_MAX and waited < BACK_S:
        pause.wait(0.05)
        waited += 0.05
    assert process.num_fds() <= descriptors + DESCRIPTORS_MAX, f"{door.name}: descriptors were not given back"
    assert process.memory_info().rss < memory + GROWTH_BYTES_MAX, f"{door.name}: memory grew"


# Cells for the long run: other doors have the same listener, or other tests of this folder make the attack fast. Every
# door and every attack keeps a fast cell.
LONG = {
    "head gRPC": ATTACKS.keys() - {"no secret", "wrong secret", "flood"},
    "uplink gRPC": ATTACKS.keys() - {"no secret"},
    "object store gRPC": ATTACKS.keys() - {"no secret"},
    "ps scheduler gRPC": ATTACKS.keys() - {"no secret"},
    "scheduler gRPC": ATTACKS.keys() - {"wrong secret"},
    "coordinator gRPC": ATTACKS.keys() - {"silent", "flood", "other uid"},
    "native stream": ATTACKS.keys() - {"no secret", "squatted port"},
    "ps scheduler frames": ATTACKS.keys() - {"no secret", "garbage"},
    "ps HTTP": ATTACKS.keys() - {"wrong secret", "deep nesting"},
    "ps server TCP": ATTACKS.keys() - {"oversized", "right secret replayed"},
    "ps server Unix socket": {"slow", "garbage", "oversized", "deep nesting"},
    "collective TCP": ATTACKS.keys() - {"right secret replayed", "deep nesting"},
    "collective abstract socket": {"slow", "garbage", "oversized", "deep nesting"},
}
PAIRS = [(door, name) for door in DOORS for name in ATTACKS if name not in door.impossible]
CELLS = [
    pytest.param(
        door,
        name,
        id=f"{door.name}: {name}".replace(" ", "-"),
        marks=[pytest.mark.long] if name in LONG.get(door.name, ()) else [],
    )
    for door, name in PAIRS
]


NEEDS_ROOT = {"other uid", "squatted folder"}


@pytest.mark.parametrize(("cell", "name"), CELLS, indirect=["cell"])
def test_attack_on_a_door_gets_nothing_and_stops_nobody(cell, name):
    if name in NEEDS_ROOT and cell.uid is None:
        TABLE[cell.door.name, name] = "not tried: needs root"
        pytest.skip("attacks as another Unix user need root, which can become any user")
    TABLE[cell.door.name, name] = ATTACKS[name](cell)


def outcome_of(door: type[Door], name: str, left_out: str) -> str:
    """A cell of the table. One that failed says so."""
    if name in door.impossible:
        return door.impossible[name]
    is_long = name in LONG.get(door.name, ())
    if is_long is not ("FASTRT_LONG" in os.environ):
        return left_out
    return TABLE.get((door.name, name), "**failed**")


def test_table_has_no_empty_cell(request):
    """The table, for people: what each attack came to. The long run fills in the cells that the fast one leaves out."""
    run = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    if not {param.id for param in CELLS if not param.marks} <= run:
        pytest.skip("only a part of the attacks was run")
    write_table(outcome_of, "in the long run")


@pytest.mark.long
def test_table_of_the_long_run_has_no_empty_cell(request):
    run = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    if not {param.id for param in CELLS if param.marks} <= run:
        pytest.skip("only a part of the attacks was run")
    write_table(outcome_of, "in the fast run")


def write_table(outcome_of: Callable[[type[Door], str, str], str], left_out: str) -> None:
    """Print the table; fails if a cell is empty."""
    lines = ["| door | attack | outcome |", "|---|---|---|"]
    for door in DOORS:
        for name in ATTACKS:
            outcome = outcome_of(door, name, left_out)
            assert outcome, (door.name, name)
            lines.append(f"| {door.name} | {name} | {' '.join(outcome.split())} |")
    table = "\n".join(lines) + "\n"
    if path := os.environ.get("FASTRT_ATTACKS_TABLE"):
        Path(path).write_text(table)
    print("\n" + table)  # noqa: T201
    assert "**failed**" not in table


def test_each_door_and_each_attack_has_a_fast_cell():
    fast = [(door, name) for door, name in PAIRS if name not in LONG.get(door.name, ())]
    assert {door for door, _ in fast} == set(DOORS)
    assert {name for _, name in fast} == set(ATTACKS)
    assert LONG.keys() <= {door.name for door in DOORS}


def test_no_reason_is_given_for_an_attack_that_is_made():
    for door in DOORS:
        assert door.impossible.keys() <= ATTACKS.keys()
        assert all(len(reason) > 20 for reason in door.impossible.values())
