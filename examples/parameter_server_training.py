"""Two models on real data, trained by two workers on two parameter servers, by all_reduce, and by one process alone.

Run: python examples/parameter_server_training.py      (needs scikit-learn, for its bundled data)

- Logistic regression on handwritten digits: its weights are a dense table.
- A factorisation machine on diabetes patients: each of ten measurements is one of ten bins, so a patient is ten keys of
  an embedding, whose rows are a linear weight and a vector; the bias is a table.

Each worker has every second row of the data. In synchronous mode a step is the mean of the workers' gradients, so each
divides by the share of a worker: the mean is then the gradient over all rows, and all three ways come to the same.

Source: Rendle, "Factorization Machines", 2010.
"""

import multiprocessing

import numpy as np
from sklearn.datasets import load_diabetes, load_digits

from fastrt import ps
from fastrt.collective import init_group

WORKERS, SERVERS, TEST_EVERY = 2, 2, 5
STEPS, RATE, FACTORS, BINS = 60, 0.5, 4, 10
DECAY = 1e-3
F = np.float32


def split(x, y):
    """Split rows into training and test; every fifth row is for the test."""
    test = np.arange(len(x)) % TEST_EVERY == 0
    return (x[~test], y[~test]), (x[test], y[test])


# ---- the models: the gradient of the mean loss, if `total` rows are meant ----


def digits():
    """Pixels from 0 to 1 and a column of ones; one of ten."""
    pixels, which = load_digits(return_X_y=True)
    return split(np.hstack([pixels / 16, np.ones((len(pixels), 1))]).astype(F), np.eye(10, dtype=F)[which])


def digits_gradient(weights, x, y, total):
    scores = x @ weights
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    return x.T @ (likely - y) / F(total)


def patients():
    """Ten keys of each patient; how the disease has progressed, around 0."""
    values, progress = load_diabetes(return_X_y=True)
    edges = np.quantile(values, np.linspace(0, 1, BINS + 1)[1:-1], axis=0)
    bins = np.stack([np.searchsorted(edges[:, k], values[:, k]) for k in range(values.shape[1])], axis=1)
    return split(bins + BINS * np.arange(values.shape[1]), ((progress - progress.mean()) / progress.std()).astype(F))


def predicted(bias, rows):
    """Of the rows of each patient's keys: (patients, keys, 1 + FACTORS)."""
    linear, vectors = rows[..., 0], rows[..., 1:]
    together = vectors.sum(axis=1)
    return bias + linear.sum(axis=1) + ((together**2).sum(axis=1) - (vectors**2).sum(axis=(1, 2))) / 2


def patients_gradient(bias, rows, y, total):
    """Of the bias and of each row, as often as it stands there."""
    error = (predicted(bias, rows) - y) / F(total)
    vectors = rows[..., 1:]
    grads = np.empty_like(rows)
    grads[..., 0] = error[:, None]
    grads[..., 1:] = error[:, None, None] * (vectors.sum(axis=1, keepdims=True) - vectors)
    return error.sum(), grads


# ---- alone ----


def digits_alone(x, y):
    weights = np.zeros((x.shape[1], y.shape[1]), F)
    for _ in range(STEPS):
        weights -= F(RATE) * (digits_gradient(weights, x, y, len(x)) + F(DECAY) * weights)
    return weights


def patients_alone(keys, y, reduce=lambda array: array, total=None):
    """With `reduce` of some of the patients, of whom all have `total`."""
    table, bias = first_rows(), F(0)
    for _ in range(STEPS):
        of_bias, grads = patients_gradient(bias, table[keys], y, total or len(y))
        summed = np.zeros_like(table)
        np.add.at(summed, keys, grads)
        summed, of_bias = reduce(summed), reduce(np.array([of_bias], F))[0]
        table -= F(RATE) * summed
        bias -= F(RATE) * of_bias
    return bias, table


def first_rows():
    """The initial rows, the same as the servers': a function of the key."""
    return START.rows(np.arange(10 * BINS, dtype=np.uint64), 1 + FACTORS)


START = ps.Normal(0.1, seed=3)


# ---- on parameter servers ----


def worker(cluster, result):
    """One of WORKERS processes; each receives the cluster as an argument."""
    with cluster:
        (x, y), _ = digits()
        (keys, progress), _ = patients()
        mine = slice(cluster.rank, None, WORKERS)
        weights = cluster.table("digits", (x.shape[1], 10), optimizer=ps.SGD(RATE, weight_decay=DECAY))
        rows = cluster.embedding("patients", 1 + FACTORS, rows=10 * BINS, init=START, optimizer=ps.SGD(RATE))
        bias = cluster.table("bias", (1,), optimizer=ps.SGD(RATE))
        for _ in range(STEPS):
            weights.push(digits_gradient(weights.pull(), x[mine], y[mine], len(x) / WORKERS))
            of_bias, grads = patients_gradient(
                bias.pull()[0], rows.pull(keys[mine]), progress[mine], len(keys) / WORKERS
            )
            rows.push(keys[mine], grads)
            bias.push(np.array([of_bias], F))
        found = weights.pull(), bias.pull()[0], rows.pull(np.arange(10 * BINS))
        cluster.barrier()
        if cluster.rank == 0:
            result.send(found)


def by_servers():
    with ps.start(SERVERS, num_workers=WORKERS) as cluster:
        return in_processes(worker, [(cluster,)] * WORKERS)


# ---- by all_reduce ----


def member(rank, result):
    (keys, progress), _ = patients()
    with init_group(name="patients", rank=rank, world_size=WORKERS) as group:
        mine = slice(rank, None, WORKERS)
        found = patients_alone(keys[mine], progress[mine], group.all_reduce, len(keys))
    if rank == 0:
        result.send(found)


def in_processes(function, arguments):
    """The message of the first process that sends one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=function, args=(*some, sender)) for some in arguments]
    for process in processes:
        process.start()
    sender.close()
    found = receiver.recv()
    for process in processes:
        process.join()
    return found


def main():
    (x, y), (test_x, test_y) = digits()
    (keys, progress), (test_keys, test_progress) = patients()
    weights = digits_alone(x, y)
    bias, table = patients_alone(keys, progress)
    served_weights, served_bias, served_table = by_servers()
    reduced_bias, reduced_table = in_processes(member, [(rank,) for rank in range(WORKERS)])

    def right(weights):
        return float(np.mean((test_x @ weights).argmax(axis=1) == test_y.argmax(axis=1)))

    def explained(bias, table):
        error = predicted(bias, table[test_keys]) - test_progress
        return float(1 - np.mean(error**2) / np.var(test_progress))

    def furthest(*pairs):
        return max(float(np.abs(one - other).max()) for one, other in pairs)

    print(f"digits, alone: {right(weights):.4f} are right")
    print(f"digits, {WORKERS} workers and {SERVERS} servers: {right(served_weights):.4f}")
    print(f"digits, largest difference: {furthest((weights, served_weights)):.1e}")
    print(f"patients, alone: {explained(bias, table):.4f} of the variance is explained")
    print(f"patients, {WORKERS} workers and {SERVERS} servers: {explained(served_bias, served_table):.4f}")
    print(f"patients, {WORKERS} processes by all_reduce: {explained(reduced_bias, reduced_table):.4f}")
    differences = furthest((table, served_table), (bias, served_bias)), furthest((table, reduced_table))
    print(f"patients, largest difference: {max(differences):.1e}")


if __name__ == "__main__":
    main()
