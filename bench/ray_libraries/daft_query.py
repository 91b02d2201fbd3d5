"""Daft's Ray runner: a group-by over four partitions, and a filter."""

import time

import daft

ROWS = 200_000


def main() -> None:
    daft.set_runner_ray()
    frame = daft.from_pydict({"key": [k % 7 for k in range(ROWS)], "value": [float(k) for k in range(ROWS)]})
    frame.where(daft.col("value") > 9).count_rows()  # the runner's actors start here
    began = time.perf_counter()
    sums = frame.repartition(4, "key").groupby("key").agg(daft.col("value").sum().alias("sum")).sort("key").to_pydict()
    print([sums["sum"], frame.where(daft.col("value") > 9000).count_rows()])
    print(f"seconds: {time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
