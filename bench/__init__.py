"""Benchmarks: pytest-benchmark suites (`bench_*.py`) and the comparison with other libraries (`compare.py`).

`make bench` and `fastrt bench` run the suites; `python bench/compare.py`, or `python -m fastrt.bench.compare` from an
installed wheel, runs the comparison.
"""
