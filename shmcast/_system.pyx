# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: auto_pickle=False, autotestdict=False
# cython: embedsignature=True, embedsignature.format=python
"""
System calls that Python can't be trusted with here.

Some builds lack them: a Python compiled against an old C library has no `memfd_create`, whatever
the kernel. And some programs replace them: under gevent `select.epoll` is gone, a thread of Python
is a greenlet, and a wait in `select` or `time` lets another one into the middle of a call.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_release_lock, PyThread_type_lock,
)
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t, uint64_t


cdef extern from *:
    """
    #include <poll.h>
    #include <pthread.h>
    #include <signal.h>
    #include <sys/epoll.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    static int wait_for_one(int descriptor, short events, int timeout_ms) {
        struct pollfd wanted = {descriptor, events, 0};
        return poll(&wanted, descriptor >= 0, timeout_ms);
    }

    /* Signals are for the program's own threads: from the start on, so that none is lost here. */
    static int start_masked(void (*run)(void *), void *argument) {
        sigset_t all, before;
        unsigned long thread;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread = PyThread_start_new_thread(run, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return thread != (unsigned long)-1;
    }

    static void call(PyObject *function) {
        PyObject *result = PyObject_CallNoArgs(function);
        if (!result)
            PyErr_WriteUnraisable(function);
        Py_XDECREF(result);
    }

    static void name_thread(const char *name) {
        pthread_setname_np(pthread_self(), name);
    }
    """
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
        EPOLL_CTL_MOD
        POLLIN
        SYS_memfd_create
        SYS_pidfd_open
    unsigned int READABLE "EPOLLIN"
    unsigned int ONCE "EPOLLONESHOT"
    ctypedef union epoll_data_t:
        uint64_t u64
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    long syscall(long number, ...) nogil
    int epoll_create1(int flags)
    int epoll_ctl(int poller, int operation, int descriptor, epoll_event *event)
    int epoll_wait(int poller, epoll_event *events, int most, int timeout_ms) nogil
    int close_descriptor "close"(int descriptor)
    int wait_for_one(int descriptor, short events, int timeout_ms) nogil
    bint start_masked(void (*run)(void *) noexcept, void *argument)
    void call(object function) noexcept
    void c_name_thread "name_thread"(const char *name)


cdef extern from "pythread.h" nogil:
    ctypedef enum PyLockStatus:
        PY_LOCK_ACQUIRED
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds,
                                             int interruptible) noexcept


cdef enum:
    MOST_EVENTS = 64
    LONGEST_WAIT_MS = 1 << 30

#: What a `Poller` is asked for, and says: to be combined by `|`.
EVENT_READABLE = READABLE
EVENT_ONCE = ONCE


cdef int milliseconds(timeout_s) except -2:
    """A timeout for the kernel, rounded up, or it would end too early and be asked for again."""
    if timeout_s is None or timeout_s * 1e3 >= LONGEST_WAIT_MS:
        return -1 if timeout_s is None else LONGEST_WAIT_MS
    return <int>(timeout_s * 1e3 + 0.999)


def memory_file(str name not None, unsigned int flags):
    """`memfd_create`: the descriptor of a new memory file."""
    cdef bytes encoded = name.encode()
    cdef const char *text = encoded
    cdef long descriptor = syscall(SYS_memfd_create, text, flags)
    if descriptor < 0:
        PyErr_SetFromErrno(OSError)
    return descriptor


def pidfd_open(int pid):
    """A descriptor of a process, readable once that has ended."""
    cdef long descriptor = syscall(SYS_pidfd_open, pid, 0)
    if descriptor < 0:
        PyErr_SetFromErrno(OSError)
    return descriptor


def name_thread(bytes name not None):
    """What tools such as `ps` and debuggers call the thread that this is called in."""
    c_name_thread(name)


def is_readable(int descriptor, timeout_s=0):
    """
    Whether there is something to read, or there will be within this time.

    Returns early for a signal, whose handler has run.
    """
    cdef int n_ready, timeout_ms = milliseconds(timeout_s)
    if timeout_ms == 0:
        return wait_for_one(descriptor, POLLIN, 0) > 0
    with nogil:
        n_ready = wait_for_one(descriptor, POLLIN, timeout_ms)
    PyErr_CheckSignals()
    return n_ready > 0


def sleep(timeout_s):
    """Sleep; returns early for a signal, whose handler has run."""
    cdef int timeout_ms = milliseconds(timeout_s)
    with nogil:
        wait_for_one(-1, 0, timeout_ms)
    PyErr_CheckSignals()


@cython.final
cdef class Poller:
    """
    An epoll instance: descriptors that are waited for together, each under a key.

    A poller can be watched by another one, and be changed while somebody waits.
    """

    cdef readonly int descriptor

    def __cinit__(self):
        self.descriptor = epoll_create1(EPOLL_CLOEXEC)
        if self.descriptor < 0:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)

    def add(self, int descriptor, uint32_t events, uint64_t key):
        """Wait for one more descriptor."""
        self.change(EPOLL_CTL_ADD, descriptor, events, key)

    def modify(self, int descriptor, uint32_t events, uint64_t key):
        """Wait for other events of a descriptor, or once more."""
        self.change(EPOLL_CTL_MOD, descriptor, events, key)

    def remove(self, int descriptor):
        """Do not wait for a descriptor any more."""
        self.change(EPOLL_CTL_DEL, descriptor, 0, 0)

    cdef int change(self, int operation, int descriptor, uint32_t events, uint64_t key) except -1:
        cdef epoll_event event
        event.events = events
        event.data.u64 = key
        if epoll_ctl(self.descriptor, operation, descriptor, &event):
            PyErr_SetFromErrno(OSError)
        return 0

    def wait(self, timeout_s):
        """
        The keys of what has come, some of it if it is much.

        Args:
            timeout_s: in seconds; None waits for ever.

        Returns early, with nothing, for a signal, whose handler has run.
        """
        cdef epoll_event events[MOST_EVENTS]
        cdef int index, n_events, timeout_ms = milliseconds(timeout_s)
        with nogil:
            n_events = epoll_wait(self.descriptor, events, MOST_EVENTS, timeout_ms)
        if n_events < 0:
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()
        return [events[index].data.u64 for index in range(n_events)]

    def close(self):
        """Wait for nothing any more."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_descriptor(descriptor)


@cython.final
cdef class Thread:
    """
    A thread of the system that runs a function and takes no signals.

    The interpreter ends without waiting for it.

    Args:
        function: what to run.

    Raises:
        OSError: the system has no room for a thread.
    """

    cdef PyThread_type_lock running          # held by the thread
    cdef object function

    def __cinit__(self, function not None):
        self.function = function
        self.running = PyThread_allocate_lock()
        if self.running is NULL:
            raise MemoryError
        PyThread_acquire_lock(self.running, NOWAIT_LOCK)
        Py_INCREF(self)
        if not start_masked(run_thread, <void *>self):
            Py_DECREF(self)
            raise OSError("no room for a thread (RLIMIT_NPROC, or the group's pids.max)")

    def __dealloc__(self):
        if self.running is not NULL:
            PyThread_free_lock(self.running)

    def join(self, timeout_s):
        """Wait for its end, but no longer than this; whether it has ended."""
        cdef long long timeout_us = <long long>(timeout_s * 1e6)
        cdef int status
        with nogil:
            status = PyThread_acquire_lock_timed(self.running, timeout_us, 0)
        if status == PY_LOCK_ACQUIRED:
            PyThread_release_lock(self.running)
        return status == PY_LOCK_ACQUIRED


cdef void run_thread(void *argument) noexcept with gil:
    cdef Thread thread = <Thread>argument
    call(thread.function)
    thread.function = None
    PyThread_release_lock(thread.running)
    Py_DECREF(thread)
