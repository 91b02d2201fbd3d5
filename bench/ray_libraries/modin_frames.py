"""Modin's dataframes on its Ray engine: a group-by, a sort, a join, a rolling mean, and a CSV file."""

import os
import tempfile
import time

os.environ["MODIN_ENGINE"] = "ray"
os.environ["MODIN_CPUS"] = "2"

import numpy as np

ROWS = 400_000


def main() -> None:
    import modin.pandas as pd

    random = np.random.default_rng(0)
    data = {
        "key": random.integers(0, 1000, ROWS),
        "value": random.normal(size=ROWS),
        "kind": random.integers(0, 9, ROWS),
    }
    pd.DataFrame({"value": [1.0]}).sum()  # the engine starts here
    began = time.perf_counter()
    frame = pd.DataFrame(data)
    sums = frame.groupby("key").sum()
    found = [
        sums.value.max(),
        frame.sort_values(["key", "value"]).value.iloc[1000],
        frame.head(5000).merge(sums.reset_index(), on="key").value_y.sum(),
        frame.value.rolling(10).mean().sum(),
        frame.head(2000).apply(lambda row: row.value * row.kind, axis=1).sum(),
        frame.kind.value_counts().sort_index().tolist(),
    ]
    with tempfile.TemporaryDirectory() as folder:
        frame.to_csv(f"{folder}/rows.csv", index=False)
        found.append(pd.read_csv(f"{folder}/rows.csv").describe().round(6).value.tolist())
    print([np.round(one, 6).tolist() for one in found])
    print(f"seconds: {time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
