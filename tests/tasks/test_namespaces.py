"""Namespaces: names of actors that are the same and do not meet, and what inherits which namespace."""

import multiprocessing

import pytest

import fastrt
from fastrt.errors import ActorNotFoundError, NameTakenError
from fastrt.store import client as store_client
from fastrt.tasks import namespaces, options

SOON_S = 30.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote
class Named:
    def where(self):
        return fastrt.get_runtime_context().namespace

    def find(self, name):
        return fastrt.get(fastrt.get_actor(name).where.remote())

    def make(self, name):
        self.kept = Named.options(name=name).remote()
        return fastrt.list_named_actors()


@fastrt.remote
def find(name, namespace=None):
    return fastrt.get(fastrt.get_actor(name, namespace).where.remote())


@fastrt.remote
def nested(name):
    return fastrt.get(find.remote(name)), fastrt.get_runtime_context().namespace


def found(name):
    return fastrt.get_runtime_context().namespace, get(fastrt.get_actor(name).where.remote())


def in_child(function, *args):
    """Call it in a forked child."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


@pytest.fixture
def session(runtime_dir):
    with fastrt.init(2, "64MiB", runtime_dir=runtime_dir) as session:
        yield session


@pytest.mark.usefixtures("session")
def test_same_name_in_two_namespaces_is_two_actors():
    own, one, other = Named.options(name="n").remote(), *[
        Named.options(name="n", namespace=space).remote() for space in ("a", "b")
    ]  # fmt: skip
    assert [fastrt.get_actor("n"), fastrt.get_actor("n", "a"), fastrt.get_actor("n", "b")] == [own, one, other]
    assert Named.options(name="n", namespace="a", get_if_exists=True).remote() == one
    with pytest.raises(NameTakenError, match="in namespace 'b' of this session"):
        Named.options(name="n", namespace="b").remote()
    assert fastrt.list_named_actors() == ["n"]
    everywhere = fastrt.list_named_actors(all_namespaces=True)
    assert everywhere == [{"name": "n", "namespace": space} for space in ("", "a", "b")]
    assert sorted((row["name"], row["namespace"]) for row in fastrt.list_actors() if row["name"]) == [
        ("n", ""), ("n", "a"), ("n", "b")
    ]  # fmt: skip
    fastrt.kill(one)
    with pytest.raises(ActorNotFoundError, match="'n' in namespace 'a' of this session; there are: none; one is in"):
        fastrt.get_actor("n", "a")
    assert get(own.where.remote()) == "", "the namespace of its name is not the one that it is in"


def test_what_a_driver_says_holds_for_its_tasks_and_actors(runtime_dir):
    with fastrt.init(2, "64MiB", namespace="team", runtime_dir=runtime_dir):
        assert fastrt.get_runtime_context().namespace == "team"
        own = Named.options(name="own").remote()
        outside = Named.options(name="outside", namespace="").remote()
        assert get(own.where.remote()) == "team"
        assert get(find.remote("own")) == "team"
        assert get(nested.remote("own")) == ("team", "team")
        assert get(outside.find.remote("own")) == "team"
        assert get(find.remote("outside", "")) == "team"
        assert get(own.make.remote("made")) == ["made", "own"]
        assert fastrt.list_named_actors() == ["made", "own"]
        with pytest.raises(ActorNotFoundError, match="one is in namespace ''"):
            fastrt.get_actor("outside")
        with pytest.raises(ActorNotFoundError):
            get(find.remote("outside"))
        assert get(find.options(runtime_env={"env_vars": {"A": "b"}}).remote("own")) == "team"
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir):
        assert fastrt.get_runtime_context().namespace == ""


def test_forked_child_is_in_the_namespace_of_its_parent(runtime_dir):
    """A pre-forking server names its actors, and then forks the processes that look them up."""
    with fastrt.init(2, "64MiB", namespace="team", runtime_dir=runtime_dir):
        one = Named.options(name="one").remote()
        assert get(one.where.remote()) == "team"
        assert in_child(found, "one") == ("team", "team")
        assert in_child(one_task) == "team"


def one_task():
    return get(find.remote("one"))


def test_local_mode_has_namespaces():
    with fastrt.init(local_mode=True, namespace="team"):
        own = Named.options(name="own").remote()
        assert get(own.where.remote()) == "team"
        assert fastrt.list_named_actors(all_namespaces=True) == [{"name": "own", "namespace": "team"}]
        with pytest.raises(ActorNotFoundError):
            fastrt.get_actor("own", namespace="")


def test_what_cannot_be_a_name_or_a_namespace_is_refused():
    for call, error, words in (
        (lambda: Named.options(namespace=5), TypeError, "namespace is 5"),
        (lambda: Named.options(name="a\x1eb"), ValueError, "must not have the characters"),
        (lambda: fastrt.get_actor("n", namespace="\x1f"), ValueError, "must not have the characters"),
        (lambda: Named.options(name=""), ValueError, "cannot be an empty string"),
        (lambda: namespaces.stored("n" * 100, "s" * 100), ValueError, "202 bytes"),
        (lambda: fastrt.init(1, "64MiB", namespace=5), TypeError, "namespace is 5"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not fastrt.is_initialized()
    assert namespaces.split(namespaces.stored("n", "s")) == ("s", "n")


def test_policies_of_one_content_that_other_nodes_send_are_one_object(runtime_dir):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir):
        store = store_client.require()
        first, other = (options._with_namespace(b"", space) for space in ("one", "two"))
        kept = options.received(store, first)
        assert store.load(kept).environment.namespace == "one"
        assert kept == options.received(store, first)
        assert kept != options.received(store, other)
        del kept
