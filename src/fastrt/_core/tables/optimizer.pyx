# cython: language_level=3, freethreading_compatible=True
"""Parameter updates in place: SGD, momentum, Adagrad, Adam and AdamW, FTRL, over float32 buffers.

The parameter, its gradient and the optimizer's state are contiguous buffers of float32. With `rows`, which are int64,
the gradient covers only these rows of the parameter, and nothing else is touched: for Adam this is called lazy Adam.
Each row may be named once; sum the gradients of a row first. With `out` the new parameter is written there, and the old
one does not change, because others may still read it. All arguments are checked before anything changes. The work is
done without the GIL, so two threads must not update one parameter at the same time.

Source: the papers named below; weight decay of Adam is that of AdamW, apart from the gradient.
"""
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport pow as c_pow
from libc.math cimport sqrt as c_sqrt
from libc.stdint cimport int64_t, uintptr_t

cdef enum Kind:
    SGD, MOMENTUM, NESTEROV, ADAGRAD, ADAM, FTRL

cdef bytes FLOAT = b"f"
cdef tuple LONGS = (b"q", b"l")  # int64 is long or long long, by platform


cdef class _Arrays:
    """The buffers of one update, held while it runs."""
    cdef Py_buffer views[ARRAYS_MAX + 2]
    cdef int held
    cdef int count           # float32 arrays; the rows or `out`, if any, follow them
    cdef float *out          # the new parameter is written here
    cdef size_t size         # elements of the parameter
    cdef size_t grad_size
    cdef size_t row_count
    cdef size_t dim          # elements of a row
    cdef const int64_t *rows
    cdef bint is_sparse      # an update of rows, perhaps of none

    def __cinit__(self):
        self.held = self.count = 0
        self.size = self.grad_size = self.row_count = self.dim = 0
        self.rows = NULL
        self.out = NULL
        self.is_sparse = False

    def __dealloc__(self):
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])

    cdef int take(self, tuple arrays, object rows, object out) except -1:
        """Hold and check the parameter, the gradient and the state; then the rows and `out`."""
        cdef int i
        cdef Py_buffer *view
        for i in range(len(arrays)):
            view = self.hold(arrays[i], i != 1 and (i > 0 or out is None))
            if view.itemsize != 4 or view.format == NULL or <bytes>view.format != FLOAT:
                raise TypeError(f"array {i} of an update must be float32; its format is "
                                f"{(<bytes>view.format).decode() if view.format != NULL else 'bytes'!r}")
            if i != 1 and i > 0 and view.len != self.views[0].len:
                raise ValueError(f"array {i} of an update has {view.len // 4} elements, the parameter "
                                 f"{self.views[0].len // 4}")
        self.count = len(arrays)
        self.size = self.views[0].len // 4
        self.grad_size = self.views[1].len // 4
        if rows is not None:
            self.take_rows(rows)
        elif self.grad_size != self.size:
            raise ValueError(f"the gradient has {self.grad_size} elements, the parameter {self.size}; pass a gradient "
                             "of the same size, or its rows as rows=")
        self.out = <float *>self.views[0].buf
        if out is not None and out is not arrays[0]:
            self.take_out(out)
        self.refuse_overlap()
        return 0

    cdef int take_out(self, object out) except -1:
        """Hold and check the array for the new parameter; it then counts as one of the float32 arrays."""
        if self.is_sparse:
            raise ValueError("an update of rows is made in place: out= cannot be used with rows=")
        cdef Py_buffer *view = self.hold(out, True)
        if view.itemsize != 4 or view.format == NULL or <bytes>view.format != FLOAT or view.len != self.views[0].len:
            raise ValueError(f"out must be float32 with the parameter's {self.size} elements")
        self.count += 1
        self.out = <float *>view.buf
        return 0

    cdef Py_buffer *hold(self, object array, bint writable) except NULL:
        cdef Py_buffer *view = &self.views[self.held]
        PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        self.held += 1
        return view

    cdef int take_rows(self, object rows) except -1:
        cdef Py_buffer *view = self.hold(rows, False)
        cdef size_t i
        self.is_sparse = True
        if view.itemsize != 8 or view.format == NULL or <bytes>view.format not in LONGS:
            raise TypeError("rows must be int64")
        self.row_count = view.len // 8
        self.rows = <const int64_t *>view.buf
        if self.row_count == 0:
            if self.grad_size:
                raise ValueError(f"the gradient has {self.grad_size} elements, but rows= is empty")
            return 0
        self.dim = self.grad_size // self.row_count
        if self.dim * self.row_count != self.grad_size or self.dim == 0 or self.size % self.dim:
            raise ValueError(f"a gradient of {self.grad_size} elements does not fit {self.row_count} rows of a "
                             f"parameter of {self.size}")
        cdef int64_t last = <int64_t>(self.size // self.dim)
        for i in range(self.row_count):
            if not 0 <= self.rows[i] < last:
                raise IndexError(f"row {self.rows[i]} does not exist: the parameter has {last} rows")
        return 0

    cdef int refuse_overlap(self) except -1:
        """Raise if two arrays share memory: the loops are compiled for separate arrays."""
        cdef int i, j
        cdef uintptr_t a, b
        for i in range(self.count):
            for j in range(i):
                a, b = <uintptr_t>self.views[i].buf, <uintptr_t>self.views[j].buf
                if a < b + <uintptr_t>self.views[j].len and b < a + <uintptr_t>self.views[i].len:
                    raise ValueError(f"arrays {j} and {i} of an update share memory")
        return 0


cdef void run(Kind kind, const float *p, float *q, const float *g, float *s, float *t, size_t n,
              const frt_update *u) noexcept nogil:
    if kind == SGD:
        frt_sgd(p, q, g, n, u)
    elif kind == MOMENTUM:
        frt_momentum(p, q, g, s, n, u)
    elif kind == NESTEROV:
        frt_nesterov(p, q, g, s, n, u)
    elif kind == ADAGRAD:
        frt_adagrad(p, q, g, s, n, u)
    elif kind == ADAM:
        frt_adam(p, q, g, s, t, n, u)
    else:
        frt_ftrl(p, q, g, s, t, n, u)


cdef int update(Kind kind, tuple arrays, object rows, object out, frt_update u) except -1:
    cdef _Arrays held = _Arrays()
    held.take(arrays, rows, out)
    cdef float *p = <float *>held.views[0].buf
    cdef const float *g = <const float *>held.views[1].buf
    # A kind without state never reads these.
    cdef int states = <int>len(arrays)
    cdef float *s = <float *>held.views[2].buf if states > 2 else p
    cdef float *t = <float *>held.views[3].buf if states > 3 else p
    cdef size_t i, at
    with nogil:
        if not held.is_sparse:
            run(kind, p, held.out, g, s, t, held.size, &u)
        else:
            for i in range(held.row_count):
                at = <size_t>held.rows[i] * held.dim
                run(kind, p + at, p + at, g + i * held.dim, s + at, t + at, held.dim, &u)
    return 0


cdef frt_update constants() noexcept:
    cdef frt_update u
    u.lr = u.decay = u.beta1 = u.beta2 = u.keep1 = u.keep2 = u.eps = u.l1 = u.l2 = 0.0
    u.scale = 1.0
    return u


def sgd(param, grad, double lr, double weight_decay=0.0, rows=None, out=None):
    """Update by SGD: param -= lr * (grad + weight_decay * param).

    Args:
        param: float32, changed in place.
        grad: float32, for all elements, or for the elements of `rows` one row after the other.
        lr: learning rate.
        weight_decay: applied to all elements, or to those in `rows`.
        rows: int64 indices of rows, each once; None: the gradient covers the whole parameter.
        out: float32 of the parameter's size, for the new parameter; `param` then does not change. Not with `rows`.
    Raises:
        TypeError: a buffer is of another type.
        ValueError: sizes do not fit, or two arrays share memory.
        IndexError: a row does not exist.
    """
    cdef frt_update u = constants()
    u.lr, u.decay = <float>lr, <float>weight_decay
    update(SGD, (param, grad), rows, out, u)


def momentum(param, grad, velocity, double lr, double mu=0.9, bint nesterov=False, double weight_decay=0.0, rows=None,
             out=None):
    """Update with momentum: velocity = mu * velocity + grad; param -= lr * velocity.

    With `nesterov`: param -= lr * (grad + mu * velocity).

    Args and Raises: as `sgd`; `velocity` is float32 of the parameter's size, zero at first.
    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """
    cdef frt_update u = constants()
    u.lr, u.decay, u.beta1 = <float>lr, <float>weight_decay, <float>mu
    update(NESTEROV if nesterov else MOMENTUM, (param, grad, velocity), rows, out, u)


def adagrad(param, grad, total, double lr, double eps=1e-10, double weight_decay=0.0, rows=None, out=None):
    """Update by Adagrad: total += grad^2; param -= lr * grad / (sqrt(total) + eps).

    Args and Raises: as `sgd`; `total` is float32 of the parameter's size, not negative.
    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", 2011.
    """
    cdef frt_update u = constants()
    u.lr, u.decay, u.eps = <float>lr, <float>weight_decay, <float>eps
    update(ADAGRAD, (param, grad, total), rows, out, u)


def adam(param, grad, mean, square, long step, double lr, double beta1=0.9, double beta2=0.999, double eps=1e-8,
         double weight_decay=0.0, rows=None, out=None):
    """Update by Adam; with `weight_decay` AdamW; with `rows` lazy Adam, which does not change the means of other rows.

    Args and Raises: as `sgd`; `mean` and `square` are float32 of the parameter's size, zero at first; `step` counts
        from 1.
    Source: Kingma, Ba, "Adam", 2015; Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    if step < 1:
        raise ValueError(f"step is {step}; the first one is 1")
    cdef frt_update u = constants()
    u.lr = <float>(lr / (1.0 - c_pow(beta1, step)))
    u.scale = <float>(1.0 / c_sqrt(1.0 - c_pow(beta2, step)))
    u.beta1, u.beta2, u.keep1, u.keep2 = <float>beta1, <float>beta2, <float>(1.0 - beta1), <float>(1.0 - beta2)
    u.eps, u.decay = <float>eps, <float>(lr * weight_decay)
    update(ADAM, (param, grad, mean, square), rows, out, u)


def ftrl(param, grad, total, linear, double lr, double l1=0.0, double l2=0.0, rows=None, out=None):
    """Update by FTRL-Proximal: "follow the regularised leader", with a learning rate that falls with sqrt(total).

    Args and Raises: as `sgd`; `total` (initially positive, for example 0.1) and `linear` (initially zero) are float32
        of the parameter's size; elements whose `linear` is within `l1` become exactly zero.
    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, with beta in `total`'s first value.
    """
    if lr <= 0.0:
        raise ValueError(f"lr is {lr}; it must be more than 0")
    cdef frt_update u = constants()
    u.lr, u.l1, u.l2 = <float>(1.0 / lr), <float>l1, <float>(2.0 * l2)
    update(FTRL, (param, grad, total, linear), rows, out, u)
