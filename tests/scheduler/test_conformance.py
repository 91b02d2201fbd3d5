"""Early Ray's scheduler, rule by rule: the state machine and the real service give the same answers."""

import itertools

import pytest

from fastrt.net.grpc.descriptors import message_set

RAY = message_set("ray")
NONE = 2**64 - 1


def nested(levels: int):
    """A value of so many levels, with reference 7 at the bottom."""
    obj = RAY.message("Obj")(objref_data={"data": 7})
    for _ in range(levels - 1):
        obj = RAY.message("Obj")(list_data={"elem": [obj]})
    return obj


def test_numbers_are_dense_from_zero(world):
    stores = [world.store() for _ in range(3)]
    workers = [world.worker(stores[0], "f", results=2) for _ in range(2)]
    assert [store.number for store in stores] == [0, 1, 2]
    assert [worker.number for worker in workers] == [0, 1]
    assert world.call("PushObj", workerid=1).objref == 0
    assert world.remote("f") == [1, 2]
    assert world.call("PushObj", workerid=0).objref == 3


def test_results_count_twice_and_pushed_objects_once(world):
    worker = world.worker(world.store(), "f", results=3)
    assert world.remote("f") == [0, 1, 2]
    world.call("PushObj", workerid=worker.number)
    assert world.counts() == [2, 2, 2, 1]
    assert world.targets() == [NONE] * 4


def test_each_duplicate_counts(world):
    worker = world.worker(world.store())
    refs = [worker.push() for _ in range(3)]
    world.call("IncrementRefCount", objref=[0, 1, 0, 0])
    assert world.counts() == [4, 2, 1]
    world.call("DecrementRefCount", objref=[0, 0])
    world.call("IncrementCount", objref=2)
    world.call("DecrementCount", objref=1)
    assert world.counts() == [2, 1, 2]
    assert world.targets() == refs


def test_bad_batches_change_nothing(world):
    worker = world.worker(world.store())
    refs = [worker.push() for _ in range(3)]
    world.call("DecrementRefCount", objref=[2])
    assert world.counts() == [1, 1, -1]
    for method in ("IncrementRefCount", "DecrementRefCount"):
        world.refused("NOT_FOUND", "Reference 3 is unknown", method, objref=[*refs[:2], 3])
        world.refused("FAILED_PRECONDITION", "Reference 2 is deallocated", method, objref=[0, 1, 2])
    world.refused("FAILED_PRECONDITION", "Reference 1 has no counts left", "DecrementRefCount", objref=[0, 1, 1])
    world.refused("NOT_FOUND", "Reference 9 is unknown", "IncrementCount", objref=9)
    world.refused("FAILED_PRECONDITION", "Reference 2 is deallocated", "DecrementCount", objref=2)


def test_last_count_deallocates_in_every_store(world):
    stores = [world.store() for _ in range(3)]
    workers = [world.worker(store) for store in stores]
    ref = workers[0].push()
    for worker in workers:
        world.call("RequestObj", workerid=worker.number, objref=ref)
    world.expect(lambda: [ref in store.objects for store in stores], [True] * 3)
    world.expect(lambda: sum(entry[0] == "deliver" for store in stores for entry in store.log), 2)
    world.expect(lambda: world.counts(), [1])
    world.call("DecrementRefCount", objref=[ref])
    world.expect(lambda: [store.log[-1:] for store in stores], [[("deallocate", ref)]] * 3)
    assert world.counts() == [-1]
    assert not any(store.objects for store in stores)


def test_object_to_come_outlives_its_counts(world):
    store = world.store()
    worker = world.worker(store)
    ref = world.call("PushObj", workerid=worker.number).objref
    world.call("DecrementRefCount", objref=[ref])
    assert world.counts() == [0]
    store.put(ref)
    world.expect(lambda: store.log, [("deallocate", ref)])
    assert world.counts() == [-1]


def test_object_on_its_way_outlives_its_counts(world):
    world.gate.clear()
    stores = [world.store(), world.store()]
    workers = [world.worker(store) for store in stores]
    ref = workers[0].push()
    world.call("RequestObj", workerid=workers[1].number, objref=ref)
    world.call("DecrementRefCount", objref=[ref])
    assert world.counts() == [0]
    assert ("deallocate", ref) not in stores[0].log
    world.gate.set()
    world.expect(lambda: [("deallocate", ref) in store.log for store in stores], [True, True])
    assert world.counts() == [-1]


def test_request_waits_for_the_object(world):
    stores = [world.store(), world.store()]
    maker, reader = [world.worker(store) for store in stores]
    ref = world.call("PushObj", workerid=maker.number).objref
    world.call("RequestObj", workerid=reader.number, objref=ref)
    world.call("RequestObj", workerid=reader.number, objref=ref)
    assert stores[0].log == []
    stores[0].put(ref, b"some bytes more")
    world.expect(lambda: stores[1].objects.get(ref), b"some bytes more")
    assert stores[0].log == [("deliver", ref, stores[1].address)]  # once, however many asked


def test_request_waits_for_the_chain_of_aliases(world):
    stores = [world.store(), world.store()]
    maker, reader = [world.worker(store) for store in stores]
    first, second, third = [world.call("PushObj", workerid=maker.number).objref for _ in range(3)]
    world.call("RequestObj", workerid=reader.number, objref=first)
    world.call("AliasObjRefs", alias_objref=first, target_objref=second)
    world.call("AliasObjRefs", alias_objref=second, target_objref=third)
    assert stores[0].log == []
    stores[0].put(third)
    world.expect(lambda: stores[1].log, [("alias", first, third)])
    assert stores[1].objects == {first: b"data", third: b"data"}
    assert world.targets() == [second, third, third]


def test_alias_after_readiness_is_told_where_the_object_is(world):
    store = world.store()
    worker = world.worker(store)
    alias = world.call("PushObj", workerid=worker.number).objref
    world.call("RequestObj", workerid=worker.number, objref=alias)
    target = worker.push()
    world.call("AliasObjRefs", alias_objref=alias, target_objref=target)
    world.expect(lambda: store.log, [("alias", alias, target)])
    world.call("RequestObj", workerid=worker.number, objref=alias)  # known there: not told again
    world.call("DecrementRefCount", objref=[target])
    assert world.counts() == [1, 1 - 1]
    world.call("DecrementRefCount", objref=[alias])
    world.expect(lambda: store.log, [("alias", alias, target), ("deallocate", target)])
    assert world.counts() == [-1, -1]


def test_chain_dies_together(world):
    """h returns g's reference, which returns f's: counts [1, 0, 0], then all gone."""
    store = world.store()
    worker = world.worker(store)
    f, g, h = [world.call("PushObj", workerid=worker.number).objref for _ in range(3)]
    world.call("AliasObjRefs", alias_objref=g, target_objref=f)
    world.call("AliasObjRefs", alias_objref=h, target_objref=g)
    store.put(f)
    world.call("DecrementRefCount", objref=[g, h])
    assert world.counts() == [1, 0, 0]
    world.call("DecrementRefCount", objref=[f])
    assert world.counts() == [-1, -1, -1]
    world.expect(lambda: store.log, [("deallocate", f)])


def test_impossible_aliases_change_nothing(world):
    worker = world.worker(world.store())
    ready = worker.push()
    a, b, c = [world.call("PushObj", workerid=worker.number).objref for _ in range(3)]
    world.call("AliasObjRefs", alias_objref=a, target_objref=b)

    def refused(code, words, alias, target):
        world.refused(code, words, "AliasObjRefs", alias_objref=alias, target_objref=target)

    refused("INVALID_ARGUMENT", "alias of itself", c, c)
    refused("INVALID_ARGUMENT", "alias of itself", b, a)
    refused("FAILED_PRECONDITION", f"alias of {b} already", a, c)
    refused("FAILED_PRECONDITION", "object of its own", ready, c)
    refused("NOT_FOUND", "Reference 99 is unknown", c, 99)
    world.refused("FAILED_PRECONDITION", "is an alias", "ObjReady", objref=a, objstoreid=0)


def test_contents_go_with_their_container_to_any_depth(world):
    store = world.store()
    worker = world.worker(store)
    refs = [worker.push() for _ in range(50)]
    for outer, inner in itertools.pairwise(refs):
        world.call("IncrementRefCount", objref=[inner, inner])
        world.call("AddContainedObjRefs", objref=outer, contained_objref=[inner, inner])
    world.call("DecrementRefCount", objref=refs[1:])
    assert world.counts() == [1] + [2] * 49
    world.call("DecrementRefCount", objref=refs[:1])
    assert world.counts() == [-1] * 50
    world.expect(lambda: sorted(store.log), [("deallocate", ref) for ref in refs])


def test_objects_that_contain_each_other_are_kept(world):
    """A limit, and docs/scheduler.md says so: counting cannot tell that nobody else has them."""
    store = world.store()
    worker = world.worker(store)
    ring, own, other = [worker.push() for _ in range(3)], worker.push(), worker.push()
    for outer, inner in [*zip(ring, [*ring[1:], ring[0]], strict=True), (own, own)]:
        world.call("IncrementRefCount", objref=[inner])
        world.call("AddContainedObjRefs", objref=outer, contained_objref=[inner])
    world.call("DecrementRefCount", objref=[*ring, own, other])
    assert world.counts() == [1, 1, 1, 1, -1]
    world.expect(lambda: store.log, [("deallocate", other)])


def test_impossible_contents_change_nothing(world):
    worker = world.worker(world.store())
    outer, inner, uncounted = worker.push(), worker.push(), world.call("PushObj", workerid=worker.number).objref
    world.call("DecrementRefCount", objref=[uncounted])
    world.call("AddContainedObjRefs", objref=outer, contained_objref=[inner])

    def refused(code, words, ref, contained):
        world.refused(code, words, "AddContainedObjRefs", objref=ref, contained_objref=contained)

    refused("FAILED_PRECONDITION", "contents already", outer, [inner])
    refused("FAILED_PRECONDITION", "has no count", inner, [uncounted])
    refused("NOT_FOUND", "unknown", inner, [77])
    refused("NOT_FOUND", "unknown", 77, [inner])


def test_call_goes_to_a_worker_that_has_its_function(world):
    store = world.store()
    world.worker(store, "g")
    worker = world.worker(store, "f")
    (result,) = world.remote("f")
    world.expect(lambda: worker.log, [("f", [], [result])])
    assert world.call("SchedulerInfo").avail_worker == [0]
    worker.finish()
    assert world.counts() == [1]
    assert world.targets() == [result]
    assert world.call("SchedulerInfo").avail_worker == [0, 1]


def test_call_waits_for_its_arguments_and_finds_them_in_its_store(world):
    stores = [world.store(), world.store()]
    maker = world.worker(stores[0])
    worker = world.worker(stores[1], "f")
    early, late, alias = maker.push(), *[world.call("PushObj", workerid=0).objref for _ in range(2)]
    (result,) = world.remote("f", early, alias)
    world.call("AliasObjRefs", alias_objref=alias, target_objref=late)
    assert worker.log == []
    assert [list(task.result) for task in world.call("SchedulerInfo").task] == [[result]]
    stores[0].put(late)
    world.expect(lambda: worker.log, [("f", [early, alias], [result])])
    world.expect(lambda: sorted(stores[1].objects), [early, late, alias])
    assert stores[1].log == [("alias", alias, late)]
    assert not world.call("SchedulerInfo").task


def test_arguments_live_until_their_call_ends(world):
    store = world.store()
    worker = world.worker(store, "f")
    ref = worker.push()
    world.remote("f", ref)
    world.expect(lambda: len(worker.log), 1)
    world.call("DecrementRefCount", objref=[ref, ref])  # the caller's, and the worker's for the message
    assert world.counts()[ref] == 0
    assert store.log == []
    world.call("WorkerReady", workerid=worker.number)
    world.expect(lambda: store.log, [("deallocate", ref)])


def test_calls_wait_in_order_for_a_worker(world):
    worker = world.worker(world.store(), "f")
    results = [world.remote("f")[0] for _ in range(4)]
    for count in range(1, 5):
        world.expect(lambda count=count: len(worker.log), count)
        assert [t.result[0] for t in world.call("SchedulerInfo").task] == results[count:]
        worker.finish()
    assert [call[2][0] for call in worker.log] == results


def test_call_goes_where_its_arguments_are(world):
    stores = [world.store() for _ in range(3)]
    workers = [world.worker(store, "f") for store in stores]
    refs = [workers[2].push() for _ in range(2)] + [workers[0].push()]
    world.remote("f", *refs)
    world.expect(lambda: [len(worker.log) for worker in workers], [0, 0, 1])


def test_unregistered_function_is_refused_by_name(world):
    world.worker(world.store(), "f")
    call = RAY.message("Call")(name="missing")
    world.refused("FAILED_PRECONDITION", "function named 'missing'", "RemoteCall", call=call)


def test_unknown_numbers_are_refused(world):
    world.worker(world.store())
    world.refused("NOT_FOUND", r"Worker 5 is not registered \(workerid\)", "PushObj", workerid=5)
    world.refused("NOT_FOUND", "Worker 5", "WorkerReady", workerid=5)
    world.refused("NOT_FOUND", "Worker 5", "RequestObj", workerid=5, objref=0)
    world.refused("NOT_FOUND", "Worker 5", "RegisterFunction", workerid=5, fnname="f")
    world.refused("NOT_FOUND", "Reference 3 is unknown", "RequestObj", workerid=0, objref=3)
    world.refused("NOT_FOUND", r"Object store 9 is not registered \(objstoreid\)", "ObjReady", objref=0, objstoreid=9)
    world.refused("NOT_FOUND", "unknown", "RemoteCall", call=unknown_argument(world))
    world.refused("NOT_FOUND", "objstore_address 'x:1'", "RegisterWorker", worker_address="y:1", objstore_address="x:1")


def unknown_argument(world):
    world.call("RegisterFunction", workerid=0, fnname="f", num_return_vals=1)
    return RAY.message("Call")(name="f", arg=[{"ref": 44}])


@pytest.mark.parametrize(
    ("method", "fields", "words"),
    [
        ("RegisterObjStore", {"objstore_address": ""}, "objstore_address is empty"),
        ("RegisterObjStore", {"objstore_address": "x" * 257}, "objstore_address .* 1 to 256"),
        ("RegisterWorker", {"worker_address": "", "objstore_address": "x"}, "worker_address is empty"),
        ("RegisterFunction", {"fnname": "é" * 129}, "fnname .* 258 bytes"),
        ("RegisterFunction", {"fnname": "f", "num_return_vals": 10_001}, "num_return_vals is 10001"),
        ("RemoteCall", {}, "call.name is empty"),
        ("RemoteCall", {"call": {"name": "f", "arg": [{"ref": 0}] * 10_001}}, "call.arg has 10001"),
        ("RemoteCall", {"call": {"name": "f", "result": [1]}}, "call.result is set"),
        ("RemoteCall", {"call": {"name": "f", "arg": [{"obj": nested(33)}]}}, r"arg\[0\].obj is nested deeper than 32"),
        ("IncrementRefCount", {"objref": [0] * 1_000_001}, "objref has 1000001"),
    ],
)
def test_fields_out_of_their_limits_are_refused_by_name(world, method, fields, words):
    world.refused("INVALID_ARGUMENT", words, method, **fields)


def test_references_inside_values_are_kept_and_not_waited_for(world):
    store = world.store()
    worker = world.worker(store, "f")
    for _ in range(8):
        world.call("PushObj", workerid=worker.number)
    world.call("IncrementRefCount", objref=[7])
    world.call("RemoteCall", call={"name": "f", "arg": [{"obj": nested(32)}]})
    world.expect(lambda: len(worker.log), 1)
    world.call("DecrementRefCount", objref=[7, 7])
    store.put(7)
    assert world.counts()[7] == 0
    world.call("WorkerReady", workerid=worker.number)
    world.expect(lambda: store.log, [("deallocate", 7)])


def test_info_shows_tables_by_reference(world):
    workers = [world.worker(world.store(), "f", results=2), world.worker(world.stores[0], "g")]
    ref = workers[0].push()
    (alias,) = world.remote("g")
    world.expect(lambda: len(workers[1].log), 1)
    world.call("AliasObjRefs", alias_objref=alias, target_objref=ref)
    world.call("RegisterFunction", workerid=1, fnname="f", num_return_vals=3)
    waiting = world.remote("g", ref)
    info = world.call("SchedulerInfo")
    assert {name: (list(f.workerid), f.num_return_vals) for name, f in info.function_table.items()} == {
        "f": ([0, 1], 3),
        "g": ([1], 1),
    }
    assert info.avail_worker == [0]
    assert [(t.name, [a.ref for a in t.arg], list(t.result)) for t in info.task] == [("g", [ref], waiting)]
    assert list(info.target_objref) == [ref, ref, NONE]
    assert list(info.reference_count) == [2, 2, 2]


def test_delivery_that_fails_is_begun_anew_elsewhere(world):
    stores = [world.store() for _ in range(3)]
    workers = [world.worker(store) for store in stores]
    ref = workers[0].push()
    world.call("RequestObj", workerid=1, objref=ref)
    world.expect(lambda: ref in stores[1].objects, True)
    world.expect(lambda: sum(len(s.log) for s in stores), 1)
    stores[0].breaks = stores[1].breaks = True
    world.call("RequestObj", workerid=2, objref=ref)
    world.expect(lambda: sum(e[0] == "deliver" for s in stores for e in s.log) >= 3, True)
    stores[1].breaks = stores[0].breaks = False
    world.call("RequestObj", workerid=2, objref=ref)
    world.expect(lambda: ref in stores[2].objects, True)


def test_lost_workers_call_runs_elsewhere(world):
    store = world.store()
    first = world.worker(store, "f")
    ref = first.push()
    (result,) = world.remote("f", ref)
    world.expect(lambda: len(first.log), 1)
    world.call("DecrementRefCount", objref=[ref, result])  # unpacked
    second = world.worker(store, "f")
    first.stop()
    world.expect(lambda: second.log, [("f", [ref], [result])])
    second.finish()
    assert world.counts() == [1, 1]
    world.refused("NOT_FOUND", "Worker 0 was lost", "WorkerReady", workerid=0)


def test_call_whose_result_is_gone_already_runs_again(world):
    """Somebody made its result and dropped it, then its worker is lost: the next one gets it, counts and all."""
    store = world.store()
    first = world.worker(store, "f")
    ref = first.push()
    (result,) = world.remote("f", ref)
    world.expect(lambda: len(first.log), 1)
    store.put(result)
    world.call("DecrementRefCount", objref=[ref, result, result])
    assert world.counts() == [1, -1]
    second = world.worker(store, "f")
    first.stop()
    world.expect(lambda: second.log, [("f", [ref], [result])])
    assert world.counts() == [2, -1]


def test_lost_stores_objects_are_lost(world):
    stores = [world.store(), world.store()]
    maker, _ = [world.worker(store, "f") for store in stores]
    ref, pending = maker.push(), world.call("PushObj", workerid=0).objref
    world.call("RequestObj", workerid=1, objref=pending)
    stores[0].stop()
    world.expect(lambda: list(world.call("SchedulerInfo").avail_worker), [1])
    world.refused("DATA_LOSS", "Object 0 is lost. Object store 0", "RequestObj", workerid=1, objref=ref)
    world.refused("DATA_LOSS", "Object 1 is lost", "RequestObj", workerid=1, objref=pending)
    world.refused("DATA_LOSS", "Argument 0", "RemoteCall", call={"name": "f", "arg": [{"ref": ref}]})
    stores[1].put(ref)  # made again
    world.call("RequestObj", workerid=1, objref=ref)
    world.call("DecrementRefCount", objref=[ref, pending])
    assert world.counts() == [-1, -1]
    world.expect(lambda: stores[1].log, [("deallocate", ref)])


def test_call_with_a_lost_argument_loses_its_results(world):
    stores = [world.store(), world.store()]
    maker, worker = world.worker(stores[0]), world.worker(stores[1], "f")
    pending = world.call("PushObj", workerid=maker.number).objref
    (result,) = world.remote("f", pending)
    (after,) = world.remote("f", result)
    stores[0].stop()
    world.expect(lambda: len(world.call("SchedulerInfo").task), 0)
    assert worker.log == []
    world.refused("DATA_LOSS", f"Object {after} is lost", "RequestObj", workerid=1, objref=after)
    assert world.counts() == [1, 1, 1]  # what the messages counted is dropped
    world.call("DecrementRefCount", objref=[pending, result, after])
    assert world.counts() == [-1, -1, -1]


def test_worker_that_refuses_gets_nothing_before_it_is_ready(world):
    store = world.store()
    first, second = world.worker(store, "f"), None
    first.refuses = True
    (result,) = world.remote("f")
    world.expect(
        lambda: (len(world.call("SchedulerInfo").task), list(world.call("SchedulerInfo").avail_worker)), (1, [])
    )
    second = world.worker(store, "f")
    world.expect(lambda: second.log, [("f", [], [result])])
    first.refuses = False
    world.call("WorkerReady", workerid=first.number)
    assert world.call("SchedulerInfo").avail_worker == [0]
    world.remote("f")
    world.expect(lambda: len(first.log), 1)


def test_worker_or_store_registered_anew_replaces_itself(world):
    store = world.store()
    worker = world.worker(store, "f")
    ref = worker.push()
    reply = world.call("RegisterWorker", worker_address=worker.address, objstore_address=store.address)
    assert reply.workerid == 1
    world.refused("NOT_FOUND", "Worker 0 was lost, or replaced", "WorkerReady", workerid=0)
    assert world.call("RegisterObjStore", objstore_address=store.address).objstoreid == 1
    world.refused("NOT_FOUND", "Worker 1 was lost", "WorkerReady", workerid=1)
    world.refused("NOT_FOUND", "Object store 0", "ObjReady", objref=ref, objstoreid=0)
