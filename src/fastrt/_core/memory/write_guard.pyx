# cython: language_level=3, freethreading_compatible=True
"""A SIGSEGV handler that explains a write to a stored value before the signal ends the process.

Stored values lie in a read-only mapping. Python and NumPy refuse to write to them; compiled code that ignores NumPy's
flag gets SIGSEGV. If the address belongs to a value that this process has pinned, the handler writes one line that
names the object and the remedy. It then passes the signal on to the previous handler (Python's faulthandler, else the
default). It calls only functions that signal-safety(7) allows, and takes no lock.
"""
from fastrt._core.memory.layout cimport *

cdef extern from *:
    """
    #include <signal.h>
    #include <stdio.h>
    #include <string.h>
    #include <unistd.h>

    enum { FRT_GUARDS = 16 };  /* attachments of one process that are guarded; further ones get no message */
    static const frt_ctx *frt_guards[FRT_GUARDS];
    static struct sigaction frt_guard_before;
    static int frt_guard_installed = 0;

    static void frt_guard_say(uint64_t objref) {
        char text[320] = "fastrt: this process wrote to object 0x", *end = text + strlen(text);
        for (int shift = 60; shift >= 0; shift -= 4)
            *end++ = "0123456789abcdef"[(objref >> shift) & 15];
        strcpy(end, ", which is read-only: arrays from get() and large array arguments are views of shared memory, "
                    "and the code that wrote ignores NumPy's flag. Give it a copy: array.copy(), or get(ref, "
                    "copy=True).\\n");
        ssize_t done = write(2, text, strlen(text));
        (void)done;
    }

    static void frt_guard_on_fault(int number, siginfo_t *info, void *context) {
        const char *at = (const char *)info->si_addr;
        (void)context;
        for (int k = 0; info->si_code == SEGV_ACCERR && k < FRT_GUARDS; k++) {
            const frt_ctx *x = __atomic_load_n(&frt_guards[k], __ATOMIC_ACQUIRE);
            if (!x || at < x->view || at >= x->view + x->total_bytes) continue;
            for (uint32_t i = 0; i < x->objects_max; i++) {
                if (!x->pins_held[i]) continue;
                uint64_t offset = x->entries[i].offset, nbytes = x->entries[i].bytes;
                if ((uint64_t)(at - x->view) - offset >= nbytes) continue;
                frt_guard_say(x->entries[i].objref);
                break;
            }
        }
        sigaction(number, &frt_guard_before, NULL);
        if (info->si_code <= 0) raise(number);  /* sent by a process: returning does not repeat it, as a fault does */
    }

    static void frt_guard_add(const frt_ctx *x) {
        const frt_ctx *none;
        struct sigaction ours;
        for (int k = 0; k < FRT_GUARDS; k++) {
            none = NULL;
            if (__atomic_compare_exchange_n(&frt_guards[k], &none, x, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) break;
        }
        if (__atomic_exchange_n(&frt_guard_installed, 1, __ATOMIC_ACQ_REL)) return;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = frt_guard_on_fault;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        if (sigaction(SIGSEGV, &ours, &frt_guard_before) != 0)
            __atomic_store_n(&frt_guard_installed, 0, __ATOMIC_RELEASE);
    }

    static void frt_guard_remove(const frt_ctx *x) {
        for (int k = 0; k < FRT_GUARDS; k++)
            if (__atomic_load_n(&frt_guards[k], __ATOMIC_ACQUIRE) == x)
                __atomic_store_n(&frt_guards[k], NULL, __ATOMIC_RELEASE);
    }
    """
    void frt_guard_add(const frt_ctx *x)
    void frt_guard_remove(const frt_ctx *x)


cdef void guard_add(const frt_ctx *x) noexcept:
    """Guard the values of an attachment. `x` must stay valid until `guard_remove`."""
    frt_guard_add(x)


cdef void guard_remove(const frt_ctx *x) noexcept:
    """Stop guarding an attachment: its private counts are about to be unmapped."""
    frt_guard_remove(x)
