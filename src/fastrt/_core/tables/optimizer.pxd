cdef extern from "optimizer.h" nogil:
    ctypedef struct frt_update:
        float lr
        float decay
        float beta1
        float beta2
        float keep1
        float keep2
        float eps
        float scale
        float l1
        float l2
    void frt_sgd(const float *p, float *q, const float *g, size_t n, const frt_update *u)
    void frt_momentum(const float *p, float *q, const float *g, float *v, size_t n, const frt_update *u)
    void frt_nesterov(const float *p, float *q, const float *g, float *v, size_t n, const frt_update *u)
    void frt_adagrad(const float *p, float *q, const float *g, float *a, size_t n, const frt_update *u)
    void frt_adam(const float *p, float *q, const float *g, float *m, float *v, size_t n, const frt_update *u)
    void frt_ftrl(const float *p, float *q, const float *g, float *a, float *z, size_t n, const frt_update *u)

cdef enum:
    ARRAYS_MAX = 4  # the parameter, its gradient, and at most two arrays of state; without the rows and `out`
