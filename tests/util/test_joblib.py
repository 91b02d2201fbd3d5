"""joblib's `Parallel` with the backend "fastrt": results, errors, batching, arrays that are put once; scikit-learn."""

import multiprocessing
import os
import signal
import threading
from math import sqrt

import numpy as np
import pytest

import fastrt
from fastrt.errors import FastrtError
from fastrt.store import client as store_client

joblib = pytest.importorskip("joblib", reason="the extra `joblib` is not installed")

import fastrt.joblib  # noqa: E402  (it needs joblib)


@pytest.fixture
def config(rt):
    fastrt.joblib.register()
    with joblib.parallel_config(backend="fastrt", n_jobs=2):
        yield


def fail_at(k):
    if k == 5:
        raise KeyError(k)
    return k


def hold():
    threading.Event().wait(100)


def about(array, k):
    return float(array[k]), array.flags.writeable, os.getpid()


def test_calls_run_in_workers_in_order(config):
    assert joblib.Parallel()(joblib.delayed(sqrt)(k * k) for k in range(2000)) == list(range(2000))
    pids = set(joblib.Parallel()(joblib.delayed(lambda k: os.getpid())(k) for k in range(10)))
    assert os.getpid() not in pids
    found = joblib.Parallel(return_as="generator")(joblib.delayed(pow)(k, 2) for k in range(20))
    assert list(found) == [k * k for k in range(20)]
    found = joblib.Parallel(return_as="generator_unordered")(joblib.delayed(pow)(k, 2) for k in range(20))
    assert sorted(found) == [k * k for k in range(20)]
    assert joblib.Parallel(n_jobs=1)(joblib.delayed(os.getpid)() for _ in range(2)) == [os.getpid()] * 2
    assert joblib.Parallel(batch_size=7)(joblib.delayed(abs)(-k) for k in range(50)) == list(range(50))


def test_an_error_is_raised_and_the_backend_goes_on(config, tmp_path):
    with pytest.raises(KeyError):
        joblib.Parallel()(joblib.delayed(fail_at)(k) for k in range(100))
    assert joblib.Parallel()(joblib.delayed(abs)(-k) for k in range(5)) == list(range(5))

    def die_once(mark):
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    assert joblib.Parallel()(joblib.delayed(die_once)(tmp_path / str(k)) for k in range(2)) == [1, 1]
    with pytest.raises((TimeoutError, multiprocessing.TimeoutError)):
        joblib.Parallel(timeout=0.1)(joblib.delayed(hold)() for _ in range(2))


def test_large_arrays_are_put_once_and_read_in_place(config, monkeypatch):
    array, small = np.arange(300_000, dtype=float), np.arange(10.0)
    store, put = store_client.require(), []
    original = store.put
    monkeypatch.setattr(store, "put", lambda value: put.append(value) or original(value))
    with joblib.Parallel(batch_size=1) as parallel:
        for _ in range(2):
            rows = parallel(joblib.delayed(about)(array, k=k) for k in range(20))
            assert [row[0] for row in rows] == list(range(20))
            assert {row[1] for row in rows} == {False}
            assert parallel(joblib.delayed(about)(small, k) for k in range(2))[1][0] == 1.0
    assert [value.nbytes for value in put if isinstance(value, np.ndarray) and value.nbytes > 1 << 20] == [array.nbytes]


def test_wrong_use_is_refused(config):
    with pytest.raises(ValueError, match="n_jobs == 0"):
        joblib.Parallel(n_jobs=0)(joblib.delayed(abs)(k) for k in range(2))
    with pytest.raises(FastrtError, match="terminated"):
        fastrt.joblib.FastrtBackend().submit(abs)
    backend = fastrt.joblib.FastrtBackend()
    assert [backend.effective_n_jobs(n) for n in (None, 1, 7, -1, -2, -9)] == [1, 1, 7, 2, 1, 1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of scikit-learn's own dependencies
def test_grid_search_of_scikit_learn_finds_the_same(config):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    data, labels = load_digits(return_X_y=True)
    grid = {"C": [0.1, 1, 10], "gamma": [0.001, 0.01]}
    search = GridSearchCV(SVC(), grid, cv=3, refit=False).fit(np.tile(data, (2, 1)), np.tile(labels, 2))
    with joblib.parallel_config(backend="sequential"):
        alone = GridSearchCV(SVC(), grid, cv=3, refit=False).fit(np.tile(data, (2, 1)), np.tile(labels, 2))
    assert search.best_params_ == alone.best_params_
    assert np.array_equal(search.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"])


def test_remote_args_are_those_of_the_tasks(rt):
    fastrt.joblib.register()

    def assigned():
        return fastrt.runtime_context().get_assigned_resources()["CPU"]

    with joblib.parallel_config(backend="fastrt", n_jobs=2, ray_remote_args={"num_cpus": 2}):
        assert joblib.Parallel()(joblib.delayed(assigned)() for _ in range(4)) == [2.0] * 4
    with (
        pytest.raises(TypeError, match="colour"),
        joblib.parallel_config(backend="fastrt", n_jobs=2, ray_remote_args={"colour": 1}),
    ):
        joblib.Parallel()(joblib.delayed(abs)(-1) for _ in range(4))
