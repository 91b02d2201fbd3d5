"""Libraries that write in place to what came through the store: none may end the process, or change the stored value.

torch has no read-only tensors, and compiled code of scikit-learn does not ask NumPy's flag.
"""

import numpy as np
import pytest

import fastrt

pytestmark = pytest.mark.usefixtures("rt")


@pytest.mark.parametrize("size", [10, 256, 10_000, 3_000_000])
def test_tensor_from_the_store_is_changed_in_place_without_touching_the_store(size):
    torch = pytest.importorskip("torch")
    ref = fastrt.put(torch.ones(size))
    got, inner = fastrt.get(ref), fastrt.get(fastrt.put({"t": [torch.ones(size)]}))["t"][0]
    got += 1
    inner += 1
    assert got.sum() == inner.sum() == 2 * size
    assert fastrt.get(ref).sum() == size


def test_model_that_was_an_argument_is_trained_in_the_worker():
    torch = pytest.importorskip("torch")

    @fastrt.remote
    def step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1000)).sum().backward()
        optimizer.step()
        return model

    model = torch.nn.Linear(1000, 100)
    before = model.weight.detach().clone()
    trained = fastrt.get(step.remote(model))
    again = fastrt.get(step.remote(fastrt.put(trained)))
    assert torch.equal(model.weight, before)
    assert not torch.equal(trained.weight, before)
    assert not torch.equal(again.weight, trained.weight)
    torch.optim.SGD(again.parameters(), lr=0.1).step()


def test_tensor_made_of_a_copied_array_is_changed_in_place():
    torch = pytest.importorskip("torch")
    ref = fastrt.put(np.zeros(100_000))
    tensor = torch.from_numpy(fastrt.get(ref, copy=True))
    tensor += 1
    assert not fastrt.get(ref).any()


def test_model_of_scikit_learn_that_a_task_returned_learns_on():
    linear_model = pytest.importorskip("sklearn.linear_model")
    data, labels = np.random.default_rng(1).random((200, 2000)), np.arange(200) % 2

    @fastrt.remote
    def fit():
        return linear_model.SGDClassifier().partial_fit(data, labels, classes=[0, 1])

    model = fastrt.get(fit.remote())
    model.partial_fit(data, labels)
    assert model.predict(data).shape == (200,)


def test_frame_from_the_store_is_changed_in_place_without_touching_the_store():
    pandas = pytest.importorskip("pandas")
    ref = fastrt.put(pandas.DataFrame({"a": np.arange(10_000), "b": np.zeros(10_000)}))
    frame = fastrt.get(ref)
    frame.loc[:, "b"] += 1
    frame["a"].to_numpy()  # a view, writable or not by pandas' own rule
    assert frame["b"].sum() == 10_000
    assert fastrt.get(ref)["b"].sum() == 0
