cdef int check(int code) except -1
