/* The lock of what the threads of one process share beside the segment: the numbers, magazines and counts in frt_ctx,
 * and the intents, the counts and the trace ring in the client's slot.
 *
 * These belong to one thread at a time: to the one that holds the GIL, and where Python has none, to the one that has
 * taken this lock. With a GIL it is nothing. Its owner may take it again. Nothing that calls Python runs under it. It
 * comes after the locks of the janitor, the actors and the functions, and before all others; the links lock is taken
 * under it. Part of layout.h, which includes it after frt_ctx.
 */
#ifdef Py_GIL_DISABLED
#define FRT_NO_GIL 1
static inline void frt_threads_init(frt_ctx *x, frt_ctx *former) {
    x->threads.of = former ? former->threads.of : &x->threads;
}

static inline void frt_threads_take(frt_ctx *x) {
    frt_threads *threads = x->threads.of;
    uint64_t me = (uint64_t)pthread_self();
    if (a64_load_rlx(&threads->thread) != me) {
        PyMutex_Lock(&threads->mutex); /* a thread that waits here does not delay a garbage collection */
        a64_store_rlx(&threads->thread, me);
    }
    threads->depth++;
}

static inline void frt_threads_give(frt_ctx *x) {
    frt_threads *threads = x->threads.of;
    if (--threads->depth) return;
    a64_store_rlx(&threads->thread, 0);
    PyMutex_Unlock(&threads->mutex);
}

/* Whether another thread has made this client leave: its references are dropped, and it takes none any more. */
static inline int frt_has_left(const frt_ctx *x) { return a32_load_rlx(&x->threads.left); }

/* The same after a store of this thread, which `leave` looks at after it has set the mark: one of the two sees the
 * other. */
static inline int frt_has_left_since(const frt_ctx *x) {
    a_fence_sc();
    return frt_has_left(x);
}

static inline void frt_set_left(frt_ctx *x) {
    frt_threads_take(x);
    a32_store_sc(&x->threads.left, 1);
    frt_threads_give(x);
}
#else
#define FRT_NO_GIL 0
#define frt_threads_init(x, former) ((void)(former))
#define frt_threads_take(x) ((void)0)
#define frt_threads_give(x) ((void)0)
#define frt_has_left(x) 0
#define frt_has_left_since(x) 0
#define frt_set_left(x) ((void)0)
#endif
