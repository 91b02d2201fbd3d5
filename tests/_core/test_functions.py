"""The function table: one object for one content, for the whole session."""

import hashlib

import pytest

from fastrt._core.objects import functions, handles
from fastrt._core.repair import fsck, inspect
from fastrt.errors import ObjectStoreFullError, StaleReferenceError


def digest_of(k: int) -> bytes:
    return hashlib.blake2b(str(k).encode(), digest_size=16).digest()


def test_function_is_found_by_its_content(node, client):
    node.keeps += 1
    assert functions.find_function(client, digest_of(1)) is None
    ref = handles.put_scalar(client, b"code")
    assert functions.add_function(client, digest_of(1), ref, "f") is ref
    assert functions.find_function(client, digest_of(1)) == ref
    assert functions.function_name(client, ref.objref) == "f"
    other = handles.put_scalar(client, b"code")
    assert functions.add_function(client, digest_of(1), other, "g") == ref
    assert functions.function_name(client, other.objref) == "?"
    assert functions.function_name(client, 0) == "?"


def test_function_lives_without_references_until_the_session_ends(node, client):
    node.keeps += 1
    functions.add_function(client, digest_of(1), handles.put_scalar(client, b"code"), "f")
    ref = functions.find_function(client, digest_of(1))
    assert handles.read_scalar(client, ref, None) == b"code"
    assert handles.describe(client, ref)["counted"] == 1


def test_digests_that_begin_alike_are_told_apart(node, client):
    node.keeps += 3
    digests = [b"\0" * 15 + bytes([k]) for k in range(3)]
    refs = [functions.add_function(client, d, handles.put_scalar(client, k), "f") for k, d in enumerate(digests)]
    assert [functions.find_function(client, d) for d in digests] == refs
    assert functions.find_function(client, b"\0" * 14 + b"\1\1") is None


def test_there_can_be_as_many_functions_as_objects(make_node):
    node = make_node(objects_max=1 << 16)
    client = node.client
    digests = map(digest_of, range(1 << 17))
    held = node.fill(
        lambda: functions.add_function(client, next(digests), handles.put_scalar(client, 1), "f"), "object"
    )
    node.keeps += len(held)
    assert len(held) > 65_000
    assert functions.find_function(client, next(digests)) is None
    assert [functions.find_function(client, digest_of(k)) for k in range(len(held))] == held
    assert functions.function_name(client, held[-1].objref) == "f"
    assert len(inspect.functions(client)) == len(held) == fsck.usage(client)["functions"]
    assert fsck.fsck(client, True) == []


def test_digests_that_crowd_one_place_find_room_in_the_next_tables(make_node):
    """They differ in what is not looked at to find their place."""
    node = make_node(objects_max=1 << 14)  # for which there are two tables
    client = node.client
    digests = [bytes(8) + k.to_bytes(8, "little") for k in range(150)]
    refs = [functions.add_function(client, digest, handles.put_scalar(client, 1), "f") for digest in digests[:128]]
    another = handles.put_scalar(client, 1)
    with pytest.raises(ObjectStoreFullError, match="slots of functions"):
        functions.add_function(client, digests[128], another, "f")
    assert [functions.find_function(client, digest) for digest in digests[:128]] == refs
    assert functions.find_function(client, digests[128]) is None
    node.keeps += len(refs)


@pytest.mark.parametrize("digest", [b"", b"x" * 15, b"x" * 17])
def test_digest_of_another_length_is_refused(client, digest):
    ref = handles.put_scalar(client, 1)
    with pytest.raises(ValueError, match="not 16"):
        functions.find_function(client, digest)
    with pytest.raises(ValueError, match="not 16"):
        functions.add_function(client, digest, ref, "f")


@pytest.mark.parametrize("digest", [None, "x" * 16, bytearray(16), 5])
def test_digest_of_another_type_is_refused(client, digest):
    with pytest.raises(TypeError):
        functions.find_function(client, digest)


@pytest.mark.parametrize("ref", [None, handles.Ref(), 5], ids=["none", "made by hand", "number"])
def test_function_that_is_no_reference_is_refused(client, ref):
    with pytest.raises((TypeError, StaleReferenceError)):
        functions.add_function(client, digest_of(1), ref, "f")
    assert functions.find_function(client, digest_of(1)) is None


@pytest.mark.parametrize("name", ["", "x" * 63, "x" * 64, "ä" * 50, "\ud800", "a\0b"])
def test_name_of_any_kind_is_kept_as_far_as_it_fits(node, client, name):
    node.keeps += 1
    ref = handles.put_scalar(client, 1)
    functions.add_function(client, digest_of(1), ref, name)
    shown = functions.function_name(client, ref.objref)
    assert name.startswith(shown.rstrip("\ufffd")) or shown == "?"
    assert len(shown) <= 64


def test_processes_that_add_the_same_function_agree(node, client):
    node.keeps += 50
    peers = [node.peer(), node.peer()]
    code = """
import hashlib
[functions.add_function(client, hashlib.blake2b(str(k).encode(), digest_size=16).digest(),
                        handles.put_scalar(client, k), "f").objref for k in range(50)]
"""
    for peer in peers:
        peer.start(code)
    first, second = (peer.finish() for peer in peers)
    assert first == second
    assert [functions.find_function(client, digest_of(k)).objref for k in range(50)] == first
    assert fsck.usage(client)["objects"] == 50
