from libc.stdint cimport uint64_t
