"""Worker processes: the zygote that forks them, and the loop that pops, runs and seals."""
