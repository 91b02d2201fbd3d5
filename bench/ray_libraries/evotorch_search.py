"""EvoTorch's evolution strategies: two actors evaluate the solutions that the driver draws."""

import logging
import time

import numpy as np
import torch
from evotorch import Problem
from evotorch.algorithms import SNES

DIMENSIONS = 50
STEPS = 100


def rastrigin(x: torch.Tensor) -> torch.Tensor:
    return 10 * x.shape[-1] + torch.sum(x**2 - 10 * torch.cos(2 * np.pi * x), dim=-1)


def main() -> None:
    logging.disable(logging.INFO)
    torch.manual_seed(1)
    problem = Problem(
        "min", rastrigin, solution_length=DIMENSIONS, initial_bounds=(-1, 1), vectorized=True, num_actors=2
    )
    search = SNES(problem, popsize=400, stdev_init=1.0)
    search.run(1)  # the actors start here
    began = time.perf_counter()
    search.run(STEPS)
    seconds = time.perf_counter() - began
    print([round(float(search.status["best_eval"]), 3), round(float(search.status["mean_eval"]), 3)])
    print(f"seconds: {seconds:.3f}")
    problem.kill_actors()


if __name__ == "__main__":
    main()
