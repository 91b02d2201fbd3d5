"""`fastrt run`: one program and the nodes of its cluster, started by Slurm, MPI, Kubernetes, torchrun, ssh, or here.

The launcher starts the same command on each machine. `detect` reads from the launcher's variables which of them this
process is; `secret` derives the token of the job; at the `meeting` the others learn from the first where the head is,
and later that the program has ended; `job` runs the program and the nodes. With `--hosts`, `ssh` starts `remote` there.
"""
