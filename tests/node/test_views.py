"""The members of a cluster as the head and its nodes see them, without a network: reports in, views out."""

import random

import pytest

from fastrt.cluster.views import Members, Views
from fastrt.net.grpc.descriptors import message_set

_SET = message_set("node")
Report, View = _SET.message("fastrt.node.Report"), _SET.message("fastrt.node.View")
PART = 10_000
SOON_S = 0.02


def name(k):
    return f"{k:032x}"


def report(k, free=4, *, port=1000, looking=False, queued=0, total=4):
    return Report(
        node=name(k),
        address=f"10.0.{k >> 8}.{k & 255}:{port}",
        name=f"n{k}",
        workers=4,
        queued=queued,
        total={"CPU": total * PART} if total else {},
        free={"CPU": free * PART} if free else {},
        looking=looking,
    )


class Cluster:
    """A head, and the members as the node of each stream knows them; the clock is the test's."""

    def __init__(self, nodes=0):
        self.views = Views("c" * 32)
        self.now = 0.0
        self.members = {}
        self.invalid = []
        self.nbytes = 0
        self.unwritten = {}  # by stream: views that are still being written
        self.is_slow = set()
        for k in range(nodes):
            self.report(k, report(k))
        self.run(SOON_S)

    def report(self, stream, what):
        """A report on a stream, which the first one opens; what the head answers."""
        refused = self.views.report(stream, what)
        if refused is None:
            self.members.setdefault(stream, Members(self.invalid.append))
        return refused

    def leave(self, stream):
        self.views.leave(stream)
        del self.members[stream]
        self.unwritten.pop(stream, None)

    def step(self):
        for stream, data in self.views.due(self.now):
            self.nbytes += len(data)
            assert stream not in self.unwritten, "a stream gets one view at a time"
            self.unwritten[stream] = data
        for stream in [stream for stream in self.unwritten if stream not in self.is_slow]:
            self.write(stream)

    def write(self, stream):
        self.members[stream].apply(View.FromString(self.unwritten.pop(stream)))
        self.views.written(stream)

    def run(self, seconds):
        """Let time pass; views arrive as soon as they are due."""
        until = self.now + seconds
        self.step()
        while (at := self.views.next_at()) is not None and at <= until:
            self.now = max(self.now, at)
            self.step()
        self.now = until

    def free(self, stream, k):
        return self.members[stream].reports[name(k)].free["CPU"] // PART

    def is_complete(self):
        """Whether each node knows the last report of each."""
        rows = {node: row.report for node, row in self.views._members.items()}
        return all({**one.reports} == rows for one in self.members.values())


def same_but_looking(cluster):
    """Whether each node knows the last report of each but for `looking`, which the others do not need."""

    def plain(reports):
        found = {}
        for node, one in reports.items():
            found[node] = Report()
            found[node].CopyFrom(one)
            found[node].looking = False
        return found

    rows = plain({node: row.report for node, row in cluster.views._members.items()})
    return all(plain(one.reports) == rows for one in cluster.members.values())


def test_first_view_of_a_stream_has_all_members_and_the_next_one_only_changes():
    cluster = Cluster(3)
    cluster.report(3, report(3))
    sent = dict(cluster.views.due(1.0))
    first, later = View.FromString(sent[3]), View.FromString(sent[0])
    assert (first.changes, len(first.node)) == (False, 4)
    assert (later.changes, [one.node for one in later.node]) == (True, [name(3)])


def test_nodes_that_join_and_leave_are_known_to_all_at_once():
    cluster = Cluster(100)
    assert cluster.is_complete()
    cluster.run(1.0)
    cluster.report(100, report(100))
    cluster.step()
    assert all(name(100) in one.reports for one in cluster.members.values())
    cluster.run(1.0)
    cluster.leave(7)
    cluster.step()
    assert all(name(7) not in one.reports for one in cluster.members.values())


@pytest.mark.parametrize("nodes", [2, 10, 100])
def test_load_is_known_to_all_within_ten_milliseconds_for_each_node(nodes):
    cluster = Cluster(nodes)
    for _ in range(3):
        cluster.run(0.123)
        cluster.report(0, report(0, free=1))
        cluster.run(0.01 * nodes + SOON_S)
        assert {cluster.free(stream, 0) for stream in cluster.members} == {1}
        cluster.report(0, report(0, free=4))


def test_load_is_known_sooner_to_a_node_that_looks_for_room():
    cluster = Cluster(100)
    cluster.report(99, report(99, looking=True))
    cluster.run(1.0)
    for k in range(50):
        cluster.report(k, report(k, free=1))
    cluster.run(0.1)
    assert all(cluster.free(99, k) == 1 for k in range(50))
    behind = [stream for stream in range(99) if cluster.free(stream, 0) == 4]
    assert len(behind) > 70


def test_node_that_begins_to_look_for_room_gets_what_it_has_missed():
    cluster = Cluster(100)
    cluster.run(1.0)
    for k in range(100):
        cluster.report(k, report(k, free=2))
    cluster.run(0.2)
    assert cluster.free(90, 10) == 4
    cluster.report(90, report(90, free=2, looking=True))
    cluster.step()
    assert all(cluster.free(90, k) == 2 for k in range(100))


def test_changed_totals_travel_with_the_load():
    cluster = Cluster(3)
    changed = report(0)
    changed.total["gpu"] = changed.free["gpu"] = 2 * PART
    cluster.report(0, changed)
    cluster.run(1.0)
    assert cluster.is_complete()
    cluster.report(0, report(0, free=1))
    cluster.run(1.0)
    assert cluster.is_complete()
    cluster.report(0, report(0, free=0, total=0))
    cluster.run(1.0)
    assert cluster.is_complete()


def test_node_that_joins_again_stays_a_member_when_its_first_stream_ends():
    cluster = Cluster(3)
    assert cluster.report(10, report(1)) is None
    cluster.leave(1)
    cluster.run(1.0)
    assert cluster.is_complete()
    assert len(cluster.members[0].reports) == 3
    cluster.leave(10)
    cluster.run(1.0)
    assert set(cluster.members[0].reports) == {name(0), name(2)}


def test_reports_that_break_the_rules_are_refused():
    cluster = Cluster(2)
    taken = cluster.report(9, report(1, port=2000))
    assert taken.is_taken
    assert "is a member already, at 10.0.0.1:1000" in taken.why
    other = cluster.report(0, report(5))
    assert not other.is_taken
    assert "this stream belongs to node" in other.why
    wrong = report(0)
    wrong.free["\n"] = 1
    assert "invalid name or amount" in cluster.report(0, wrong).why
    moved = report(0)
    moved.address = "nowhere"
    assert "is not HOST:PORT" in cluster.report(0, moved).why
    assert cluster.is_complete()


def test_stream_that_reads_slowly_gets_everything_once_it_reads():
    cluster = Cluster(4)
    cluster.is_slow.add(2)
    cluster.report(4, report(4))
    cluster.run(1.0)
    cluster.leave(0)
    cluster.report(1, report(1, free=1))
    cluster.run(1.0)
    assert name(4) not in cluster.members[2].reports
    cluster.is_slow.clear()
    cluster.run(0.0)
    cluster.run(1.0)
    assert cluster.is_complete()


def test_nothing_is_sent_while_nothing_changes():
    cluster = Cluster(50)
    cluster.run(5.0)
    before = cluster.nbytes
    for k in range(50):
        cluster.report(k, report(k))
    assert cluster.views.next_at() is None
    cluster.run(5.0)
    assert cluster.nbytes == before


def test_streams_that_come_and_go_or_change_their_minds_leave_nothing_behind():
    cluster = Cluster(2)
    for k in range(2000):
        cluster.report(0, report(0, looking=k % 2 == 0))
        cluster.report(10 + k, report(3))
        cluster.run(0.1)
        cluster.leave(10 + k)
    lines = (cluster.views._looking, cluster.views._others)
    assert all(len(line._heap) < 100 for line in lines)
    assert len(cluster.views._left) < 3


def test_bytes_grow_no_faster_than_the_nodes():
    spent = []
    for nodes in (100, 400):
        views, nbytes = Views("c" * 32), 0
        for k in range(40 * nodes):
            views.report(k % nodes, report(k % nodes, free=1 + k // nodes % 2))
            for stream, data in views.due(k / nodes / 10):
                nbytes += len(data) * (k > 10 * nodes)
                views.written(stream)
        spent.append(nbytes / nodes)
    assert spent[1] < 1.1 * spent[0]


def test_ten_thousand_nodes_know_each_other():
    views = Views("c" * 32)
    for k in range(10_000):
        assert views.report(k, report(k)) is None
    sent = views.due(0.0)
    assert len(sent) == 10_000
    assert len({id(data) for _, data in sent}) == 1  # serialised once
    for stream, _ in sent:
        views.written(stream)
    assert views.report_s == 5.0
    views.leave(17)
    left = views.due(10.0)
    assert len(left) == 9999
    assert list(View.FromString(left[0][1]).left) == [name(17)]


@pytest.mark.parametrize("seed", range(20))
def test_all_nodes_know_the_last_reports_after_any_events(seed):
    rng = random.Random(seed)
    cluster = Cluster()
    streams = 0
    for _ in range(400):
        what = rng.random()
        there = list(cluster.members)
        if what < 0.2 or not there:
            streams += 1
            cluster.report(streams, report(rng.randrange(12), rng.randrange(1, 5)))
        elif what < 0.3:
            cluster.leave(rng.choice(there))
        elif what < 0.4:
            cluster.is_slow ^= {rng.choice(there)}
        elif what < 0.6:
            cluster.run(rng.random() * 0.1)
        else:
            stream = rng.choice(there)
            k = int(cluster.views._streams[stream].node, 16)
            looking, queued, total = rng.random() < 0.3, rng.randrange(3), rng.randrange(5)
            cluster.report(stream, report(k, rng.randrange(1, 5), looking=looking, queued=queued, total=total))
    cluster.is_slow.clear()
    cluster.run(0.0)
    cluster.run(2.0)
    assert same_but_looking(cluster)
    assert cluster.invalid == []


def test_reader_ignores_what_is_invalid_and_load_of_nodes_that_it_does_not_know():
    invalid = []
    members = Members(invalid.append)
    bad = report(1)
    bad.address = "x"
    change = members.apply(View(node=[report(0), bad]))
    assert change.is_full
    assert set(members.reports) == {name(0)}
    many = Report(node=name(0), queued=1 << 40)
    change = members.apply(View(changes=True, load=[many, Report(node=name(5), queued=1)], left=[name(8)]))
    assert change == (False, [], [])
    assert len(invalid) == 2
    change = members.apply(View(changes=True, left=[name(0)], node=[report(0, port=7)]))
    assert (change.left, members.reports[name(0)].address) == ([], "10.0.0.0:7")
    change = members.apply(View(node=[report(3)]))
    assert change.left == [name(0)]
