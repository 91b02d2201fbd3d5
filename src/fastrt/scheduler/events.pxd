# The types that events.py is compiled with: numbers that come from a wire are 64 bits wide there.
cimport cython
from libc.stdint cimport uint64_t


cdef class Message:
    pass


cdef class Call(Message):
    cdef public object call


@cython.final
cdef class RegisterObjStore(Call):
    cdef public str address


@cython.final
cdef class RegisterWorker(Call):
    cdef public str address
    cdef public str store_address


@cython.final
cdef class RegisterFunction(Call):
    cdef public uint64_t worker
    cdef public str name
    cdef public uint64_t result_count


@cython.final
cdef class RemoteCall(Call):
    cdef public str name
    cdef public bytes body
    cdef public object args
    cdef public object nested
    cdef public str strategy
    cdef public object max_retries


@cython.final
cdef class IncrementRefs(Call):
    cdef public object refs


@cython.final
cdef class DecrementRefs(Call):
    cdef public object refs


@cython.final
cdef class PushObj(Call):
    cdef public uint64_t worker


@cython.final
cdef class RequestObj(Call):
    cdef public uint64_t worker
    cdef public uint64_t ref


@cython.final
cdef class AliasObjRefs(Call):
    cdef public uint64_t alias
    cdef public uint64_t target


@cython.final
cdef class ObjReady(Call):
    cdef public uint64_t ref
    cdef public uint64_t store
    cdef public uint64_t nbytes


@cython.final
cdef class AddContained(Call):
    cdef public uint64_t ref
    cdef public object contained


@cython.final
cdef class WorkerReady(Call):
    cdef public uint64_t worker


@cython.final
cdef class SchedulerInfo(Call):
    pass


@cython.final
cdef class WorkerLost(Message):
    cdef public uint64_t worker


@cython.final
cdef class ObjStoreLost(Message):
    cdef public uint64_t store


@cython.final
cdef class InvokeTaken(Message):
    cdef public uint64_t worker
    cdef public uint64_t task


@cython.final
cdef class InvokeRefused(Message):
    cdef public uint64_t worker
    cdef public uint64_t task
    cdef public str reason


@cython.final
cdef class DeliveryFailed(Message):
    cdef public uint64_t ref
    cdef public uint64_t source
    cdef public uint64_t target
    cdef public str reason


@cython.final
cdef class Answer(Message):
    cdef public object call
    cdef public object value


@cython.final
cdef class InvokeCall(Message):
    cdef public uint64_t worker
    cdef public uint64_t task
    cdef public bytes body
    cdef public object results


@cython.final
cdef class DeliverObj(Message):
    cdef public uint64_t ref
    cdef public uint64_t source
    cdef public uint64_t target


@cython.final
cdef class NotifyAlias(Message):
    cdef public uint64_t store
    cdef public uint64_t alias
    cdef public uint64_t canonical


@cython.final
cdef class DeallocateObject(Message):
    cdef public uint64_t store
    cdef public uint64_t canonical


@cython.final
cdef class RequestFailed(Message):
    cdef public uint64_t worker
    cdef public uint64_t ref
    cdef public str reason


@cython.final
cdef class ForgetWorker(Message):
    cdef public uint64_t worker


@cython.final
cdef class ForgetStore(Message):
    cdef public uint64_t store
