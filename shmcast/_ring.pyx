# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: auto_pickle=False, autotestdict=False, freethreading_compatible=True
# cython: embedsignature=True, embedsignature.format=python
"""
The hot loops: copy a message into its chunk, publish it, poll, sleep, take it, release it.

No policy, no pickle, no sockets: callers hold the lock of their end, and decide what a full ring or
a silent writer means. `layout` says who owns which word; an image, as it lies in a chunk or in a
memory file, is written and parsed here alone::

    ┌──────────┬──────┬──────────────┬───────────┬─────────────────┬────────┬─ ─ ─┬──────────┬─
    │ sequence │ kind │ stream_bytes │ n_buffers │ length of each… │ stream │     │ buffer 0 │ …
    └──────────┴──────┴──────────────┴───────────┴─────────────────┴────────┴─ ─ ─┴──────────┴─
      8 bytes    8      8              8           8 a buffer                 at multiples of 64

Where `kind` says that the message lies in a memory file, its chunk ends after the header, with the
file's nonce for `stream_bytes` and the image's size for `n_buffers`.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from shmcast._atomic cimport (
    fence_acquire, fence_full, load_acquire, load_relaxed, pause_polling, store_relaxed,
    store_release, word_bump, word_load_acquire,
)

import os

from shmcast.errors import ProtocolError, QueueClosed, ShmcastError


cdef extern from *:
    """
    #include <limits.h>
    #include <linux/futex.h>
    #include <pthread.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* How many forks lie between this process and the one that loaded the module. A handler of the
     * C library sees every fork, also one that Python does not know of. */
    static unsigned long fork_count;
    static void count_fork(void) { fork_count++; }
    static int watch_forks(void) { return pthread_atfork(NULL, NULL, count_fork); }

    static inline int64_t monotonic_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    /* Not the PRIVATE flag: the other side is another process. Returns at once if the word is not
     * `expected`, and early for a wake-up or a signal: the caller looks at what it waits for. */
    static inline void sleep_on(const uint32_t *word, uint32_t expected, int64_t sleep_ns) {
        struct timespec most = {sleep_ns / 1000000000, sleep_ns % 1000000000};
        syscall(SYS_futex, word, FUTEX_WAIT, expected, &most, NULL, 0);
    }

    static void *map_file(int descriptor, size_t n_bytes, int shared, int writable) {
        void *address = mmap(NULL, n_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                             shared ? MAP_SHARED : MAP_PRIVATE, descriptor, 0);
        if (address == MAP_FAILED)
            return NULL;
        if (shared && (madvise(address, n_bytes, MADV_DONTDUMP)
                       || madvise(address, n_bytes, MADV_DONTFORK))) {
            munmap(address, n_bytes);
            return NULL;
        }
        return address;
    }

    static inline void wake_all(uint32_t *word) {
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    """
    unsigned long fork_count
    int watch_forks() noexcept
    int64_t monotonic_ns() noexcept nogil
    void sleep_on(const uint32_t *word, uint32_t expected, int64_t sleep_ns) noexcept nogil
    void wake_all(uint32_t *word) noexcept nogil
    void *map_file(int descriptor, size_t n_bytes, bint shared, bint writable) noexcept nogil
    int unmap "munmap"(void *address, size_t n_bytes) noexcept nogil


if watch_forks():
    raise MemoryError("pthread_atfork failed")


cdef enum:
    BUFFER_ALIGNMENT = 64
    POLLS_PER_CLOCK = 64          # about a microsecond of pauses
    GIL_COPY_BYTES = 16384        # a shorter copy costs less than giving up the GIL
    KIND_HERE = 1
    KIND_FILE = 2

# What `try_claim` and `try_publish` answer; anything but DONE published nothing.
cpdef enum Claim:
    DONE = 0
    FULL = 1        # no chunk is free
    LOOK = 2        # it is time to look at the control socket and at who is alive
    RESERVE = 3     # the chunk's memory is not reserved so far
    TOO_LARGE = 4   # the image does not fit a chunk
    NOBODY = 5      # no reader is left


cdef struct ImageHeader:
    uint64_t sequence
    uint64_t kind
    uint64_t stream_bytes
    uint64_t n_buffers


IMAGE_HEADER_BYTES = sizeof(ImageHeader)


cdef inline uint64_t aligned(uint64_t offset) noexcept nogil:
    return (offset + BUFFER_ALIGNMENT - 1) & ~<uint64_t>(BUFFER_ALIGNMENT - 1)


cdef inline void copy(char *destination, const char *source, size_t n_bytes) noexcept:
    if n_bytes < GIL_COPY_BYTES:
        memcpy(destination, source, n_bytes)
    else:
        with nogil:
            memcpy(destination, source, n_bytes)


cdef inline Py_buffer *buffer_of(list views, Py_ssize_t index) noexcept:
    return PyMemoryView_GET_BUFFER(<object>PyList_GET_ITEM(views, index))


cdef extern from "Python.h":
    Py_buffer *PyMemoryView_GET_BUFFER(object view) noexcept


cdef extern from "pythread.h" nogil:
    ctypedef enum PyLockStatus:
        PY_LOCK_FAILURE
        PY_LOCK_ACQUIRED
        PY_LOCK_INTR
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds,
                                             int interruptible) noexcept


@cython.final
cdef class StreamParts:
    """What pickle writes a stream to: its parts, each of them bytes, ready to be gathered."""

    cdef readonly list parts

    def __cinit__(self):
        self.parts = []

    def write(self, part):
        """Take a part. A large bytearray comes by reference, and what runs later may change it."""
        cdef Py_buffer view
        if type(part) is not bytes:
            PyObject_GetBuffer(part, &view, PyBUF_ANY_CONTIGUOUS)  # in the order of its memory
            try:
                part = PyBytes_FromStringAndSize(<const char *>view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
        self.parts.append(part)


cdef uint64_t image_size(list stream, list buffers) noexcept:
    cdef uint64_t size_bytes = sizeof(ImageHeader)
    cdef Py_ssize_t index, n_buffers = PyList_GET_SIZE(buffers)
    size_bytes += 8 * <uint64_t>n_buffers
    for index in range(PyList_GET_SIZE(stream)):
        size_bytes += <uint64_t>PyBytes_GET_SIZE(<object>PyList_GET_ITEM(stream, index))
    for index in range(n_buffers):
        size_bytes = aligned(size_bytes) + <uint64_t>buffer_of(buffers, index).len
    return size_bytes


cdef void fill_image(char *image, uint64_t sequence, list stream, list buffers) noexcept:
    """Write an image; `image_size` bytes are there. The lists pin their members."""
    cdef ImageHeader *header = <ImageHeader *>image
    cdef Py_ssize_t index, length, n_buffers = PyList_GET_SIZE(buffers)
    cdef uint64_t *table = <uint64_t *>(image + sizeof(ImageHeader))
    cdef uint64_t start = sizeof(ImageHeader) + 8 * <uint64_t>n_buffers
    cdef uint64_t offset = start
    cdef Py_buffer *view
    for index in range(PyList_GET_SIZE(stream)):
        part = <object>PyList_GET_ITEM(stream, index)
        length = PyBytes_GET_SIZE(part)
        copy(image + offset, PyBytes_AS_STRING(part), <size_t>length)
        offset += <uint64_t>length
    header.sequence = sequence
    header.kind = KIND_HERE
    header.stream_bytes = offset - start
    header.n_buffers = <uint64_t>n_buffers
    for index in range(n_buffers):
        view = buffer_of(buffers, index)
        table[index] = <uint64_t>view.len
        offset = aligned(offset)
        copy(image + offset, <const char *>view.buf, <size_t>view.len)
        offset += <uint64_t>view.len


cdef object damaged(str what):
    return ProtocolError(f"a message is damaged: {what}")


cdef object image_ranges(const char *image, uint64_t limit_bytes, uint64_t sequence):
    """
    Where the stream and each buffer lie in an image, as a list of (offset, length).

    Every number is read once and checked against `limit_bytes` before it is used.
    """
    cdef ImageHeader header
    cdef uint64_t index, length, offset
    if limit_bytes < sizeof(ImageHeader):
        raise damaged(f"{limit_bytes} bytes hold no header")
    memcpy(&header, image, sizeof(ImageHeader))
    if header.kind != KIND_HERE or header.sequence != sequence:
        raise damaged(f"kind {header.kind}, number {header.sequence} instead of {sequence}")
    if header.n_buffers > (limit_bytes - sizeof(ImageHeader)) // 8:
        raise damaged(f"{header.n_buffers} buffers in {limit_bytes} bytes")
    offset = sizeof(ImageHeader) + 8 * header.n_buffers
    if header.stream_bytes > limit_bytes - offset:
        raise damaged(f"a stream of {header.stream_bytes} bytes in {limit_bytes} bytes")
    ranges = [(offset, header.stream_bytes)]
    offset += header.stream_bytes
    for index in range(header.n_buffers):
        memcpy(&length, image + sizeof(ImageHeader) + 8 * index, 8)
        offset = aligned(offset)
        if offset > limit_bytes or length > limit_bytes - offset:
            raise damaged(f"a buffer of {length} bytes at {offset} in {limit_bytes} bytes")
        ranges.append((offset, length))
        offset += length
    return ranges


def image_bytes(list stream not None, list buffers not None):
    """How many bytes the image of this message takes."""
    return image_size(stream, buffers)


def image_pieces(uint64_t sequence, list stream not None, list buffers not None):
    """
    The image of a message for a file that reads as zeros: a list of (offset, bytes or memoryview).

    `image_bytes` says where it ends.
    """
    cdef ImageHeader header
    cdef uint64_t length, offset = sizeof(ImageHeader) + 8 * <uint64_t>len(buffers)
    cdef Py_ssize_t index
    lengths = bytearray(8 * len(buffers))
    cdef uint64_t *table = <uint64_t *>PyByteArray_AS_STRING(lengths)
    pieces = []
    for part in stream:
        pieces.append((offset, part))
        offset += <uint64_t>len(part)
    header.sequence = sequence
    header.kind = KIND_HERE
    header.stream_bytes = offset - sizeof(ImageHeader) - 8 * <uint64_t>len(buffers)
    header.n_buffers = <uint64_t>len(buffers)
    for index in range(len(buffers)):
        length = <uint64_t>buffer_of(buffers, index).len
        table[index] = length
        offset = aligned(offset)
        pieces.append((offset, buffers[index]))
        offset += length
    head = PyBytes_FromStringAndSize(<const char *>&header, sizeof(ImageHeader)) + bytes(lengths)
    return [(0, head), *pieces]


def read_image(image not None, uint64_t sequence):
    """
    The stream and the list of buffers of an image, as views of it.

    Raises ProtocolError if it is damaged.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(image, &view, PyBUF_SIMPLE)
    try:
        ranges = image_ranges(<const char *>view.buf, <uint64_t>view.len, sequence)
    finally:
        PyBuffer_Release(&view)
    whole = memoryview(image)
    views = [whole[offset : offset + length] for offset, length in ranges]
    return views[0], views[1:]


@cython.final
cdef class Memory:
    """A range of memory that `owner` keeps alive, as a writable buffer."""

    cdef char *address
    cdef Py_ssize_t n_bytes
    cdef object owner

    def __cinit__(self, size_t address, Py_ssize_t n_bytes, object owner):
        self.address = <char *>address
        self.n_bytes = n_bytes
        self.owner = owner

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.address, self.n_bytes, False, flags)


@cython.final
cdef class Mapping:
    """
    A whole file in memory, as a buffer. Unlike `mmap.mmap` it keeps no descriptor.

    A shared mapping stays out of core dumps and forked children. What is written to a private one
    is seen by nobody else, and not by the file; a forked child inherits it as it is.

    Args:
        descriptor: the file; it may be closed afterwards.
        n_bytes: its size, from 1.
        shared: whether to see what others write, and the other way round.
        writable: whether it may be written to.

    Raises:
        OSError: the kernel refused the mapping.
    """

    cdef void *address
    cdef Py_ssize_t n_bytes
    cdef bint shared, writable
    cdef unsigned long fork_count_at_start

    def __cinit__(self, int descriptor, Py_ssize_t n_bytes, *, bint shared, bint writable):
        self.n_bytes, self.shared, self.writable = n_bytes, shared, writable
        self.fork_count_at_start = fork_count
        self.address = map_file(descriptor, <size_t>n_bytes, shared, writable)
        if self.address is NULL:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        # A forked child has no shared mapping, and its range may be somebody else's by now.
        if self.address is not NULL and (
                not self.shared or self.fork_count_at_start == fork_count):
            unmap(self.address, <size_t>self.n_bytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.address, self.n_bytes, not self.writable, flags)


def new_bytearray(Py_ssize_t n_bytes):
    """A bytearray whose bytes are not set, which saves the time of clearing them."""
    return PyByteArray_FromStringAndSize(NULL, n_bytes)


cdef enum:
    MOST_DIMENSIONS = 64
    FOREVER_S = 1000000000         # a later deadline is none


cdef inline void copy_items(char *destination, const char *source, int64_t count,
                            int64_t stride_bytes, size_t item_bytes) noexcept nogil:
    """Gather `count` items. The branches give the compiler a fixed size, ten times as fast."""
    cdef int64_t index
    if item_bytes == 1:
        for index in range(count):
            destination[index] = source[index * stride_bytes]
    elif item_bytes == 2:
        for index in range(count):
            memcpy(destination + 2 * index, source + index * stride_bytes, 2)
    elif item_bytes == 4:
        for index in range(count):
            memcpy(destination + 4 * index, source + index * stride_bytes, 4)
    elif item_bytes == 8:
        for index in range(count):
            memcpy(destination + 8 * index, source + index * stride_bytes, 8)
    else:
        for index in range(count):
            memcpy(destination + <int64_t>item_bytes * index, source + index * stride_bytes,
                   item_bytes)


def copy_strided(destination not None, size_t address, tuple shape not None,
                 tuple strides not None, size_t item_bytes):
    """
    Copy a strided array into a contiguous buffer in row-major order, with the GIL released.

    Args:
        destination: a writable buffer of exactly the array's size.
        address: where the item at index 0, 0, … lies.
        shape: the length of each dimension.
        strides: the distance of neighbours in each dimension, in items.
        item_bytes: the size of an item.
    """
    cdef int64_t lengths[MOST_DIMENSIONS]
    cdef int64_t steps_bytes[MOST_DIMENSIONS]
    cdef int64_t position[MOST_DIMENSIONS]
    cdef Py_ssize_t n_dimensions = len(shape), dimension
    cdef int64_t total_bytes = <int64_t>item_bytes, row_items, row_step_bytes
    cdef size_t row_bytes, run_bytes = item_bytes
    cdef const char *source = <const char *>address
    cdef char *target
    cdef Py_buffer view
    if n_dimensions > MOST_DIMENSIONS or len(strides) != n_dimensions:
        raise ValueError(f"shape {shape} and strides {strides} are no array")
    for dimension in range(n_dimensions):
        lengths[dimension] = shape[dimension]
        steps_bytes[dimension] = strides[dimension] * <int64_t>item_bytes
        total_bytes *= lengths[dimension]
    PyObject_GetBuffer(destination, &view, PyBUF_WRITABLE)
    try:
        if view.len != total_bytes:
            raise ValueError(f"the array has {total_bytes} bytes, the destination {view.len}")
        if total_bytes == 0:
            return
        # Inner dimensions that lie without gaps are one run.
        while n_dimensions and steps_bytes[n_dimensions - 1] == <int64_t>run_bytes:
            n_dimensions -= 1
            run_bytes *= <size_t>lengths[n_dimensions]
        row_items, row_step_bytes = 1, 0
        if n_dimensions:
            n_dimensions -= 1
            row_items, row_step_bytes = lengths[n_dimensions], steps_bytes[n_dimensions]
        row_bytes = run_bytes * <size_t>row_items
        memset(position, 0, sizeof(position))
        target = <char *>view.buf
        with nogil:
            while True:
                copy_items(target, source, row_items, row_step_bytes, run_bytes)
                target += row_bytes
                dimension = n_dimensions - 1
                while dimension >= 0:
                    position[dimension] += 1
                    source += steps_bytes[dimension]
                    if position[dimension] < lengths[dimension]:
                        break
                    source -= lengths[dimension] * steps_bytes[dimension]
                    position[dimension] = 0
                    dimension -= 1
                if dimension < 0:
                    break
    finally:
        PyBuffer_Release(&view)


cdef object forked(str what, int pid):
    return ShmcastError(
        f"this {what} belongs to process {pid}; this is process {os.getpid()}, its forked child, "
        f"which needs an end of its own"
    )


@cython.final
cdef class EndLock:
    """
    One thread at a time in an end, and its last one out closes it.

    `with lock:` takes a turn, `with lock.until(deadline_s, error):` waits for it no longer than
    that. It is compiled, since a signal between the turn and the next Python instruction would
    leave a lock behind that nobody gives back.

    Args:
        role: what errors call the end, such as "writer".

    Raises:
        ShmcastError: on entry, by a call from inside the end's own pickling, loading or waiting,
            or in a forked child.
        QueueClosed: on entry, after `close`.
    """

    cdef PyThread_type_lock lock
    cdef unsigned long owner                # the thread whose turn it is, 0 for none
    cdef unsigned long fork_count_at_start
    cdef uint64_t closing
    cdef bint is_finished
    cdef object role, finish
    cdef readonly int pid

    def __cinit__(self, str role not None):
        self.lock = PyThread_allocate_lock()
        if self.lock is NULL:
            raise MemoryError
        self.role = role
        self.pid = os.getpid()
        self.fork_count_at_start = fork_count

    def __dealloc__(self):
        if self.lock is not NULL:
            PyThread_free_lock(self.lock)

    @property
    def is_closing(self):
        """Whether `close` was called."""
        return load_acquire(&self.closing) != 0

    @property
    def is_forked(self):
        """Whether this process is a forked child of the one that made this end."""
        return self.fork_count_at_start != fork_count

    def check_not_forked(self):
        """Raise ShmcastError in a forked child."""
        self._check_not_forked()

    cdef inline int _check_not_forked(self) except -1:
        if self.fork_count_at_start != fork_count:
            raise forked(self.role, self.pid)
        return 0

    def __enter__(self):
        self._enter(-1, None)
        return self

    def until(self, double deadline_s, error):
        """A turn that is waited for until this time of `time.monotonic`; then `error` is raised."""
        return _Turn(self, deadline_s, error)

    cdef int _enter(self, double deadline_s, error) except -1:
        cdef int64_t left_us
        cdef PyLockStatus status
        self._check_not_forked()
        # Before the lock too: a signal handler may have interrupted the closing itself.
        self._check_open()
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            if self.owner == PyThread_get_thread_ident():
                raise ShmcastError(
                    f"a call on this {self.role} came from inside another one in the same thread, "
                    f"such as its pickling, its loading or a signal handler"
                )
            status = PY_LOCK_FAILURE
            while status != PY_LOCK_ACQUIRED:
                left_us = -1
                if 0 <= deadline_s < FOREVER_S:
                    left_us = max(0, <int64_t>(deadline_s * 1e6) - monotonic_ns() // 1000)
                with nogil:
                    status = PyThread_acquire_lock_timed(self.lock, left_us, 1)
                if status == PY_LOCK_INTR:
                    PyErr_CheckSignals()
                elif status == PY_LOCK_FAILURE and left_us == 0:
                    raise error(f"another thread did not end its call on this {self.role} in time")
        self.owner = PyThread_get_thread_ident()
        if load_relaxed(&self.closing):
            self._leave()
            self._check_open()
        return 0

    cdef inline int _check_open(self) except -1:
        if load_relaxed(&self.closing):
            raise QueueClosed(f"this {self.role} is closed")
        return 0

    def __exit__(self, kind, error, traceback):
        self._leave()

    cdef int _leave(self) except -1:
        self.owner = 0
        PyThread_release_lock(self.lock)
        # `close` marks first and tries the lock then, we release first and look then: one of the
        # two closes the end.
        fence_full()
        if load_relaxed(&self.closing):
            self._try_finish()
        return 0

    def close(self, finish not None):
        """
        Let nobody in any more; `finish` closes the end now, or when its present turn is over.

        It is called until it has returned once, for a signal may interrupt it: then it goes on with
        the next `close`.
        """
        if not self.is_finished:
            self.finish = finish
        store_release(&self.closing, 1)
        fence_full()
        self._try_finish()

    cdef int _try_finish(self) except -1:
        if self.fork_count_at_start != fork_count or self.is_finished:
            return 0
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            return 0
        try:
            if not self.is_finished:
                self.finish()
                self.is_finished = True
                self.finish = None
        finally:
            PyThread_release_lock(self.lock)
        return 0


@cython.final
cdef class _Turn:
    cdef EndLock lock
    cdef double deadline_s
    cdef object error

    def __cinit__(self, EndLock lock, double deadline_s, error):
        self.lock = lock
        self.deadline_s = deadline_s
        self.error = error

    def __enter__(self):
        error = self.error
        self.lock._enter(self.deadline_s, error)

    def __exit__(self, kind, error, traceback):
        self.lock._leave()


@cython.no_gc_clear  # a garbage cycle must not drop what the views pin before they are released
cdef class _End:
    """What both ends have: the two mappings, pinned for as long as the object lives."""

    cdef Py_buffer data_view
    cdef Py_buffer control_view
    cdef char *data
    cdef char *control
    cdef unsigned long fork_count_at_start
    cdef uint64_t is_stopped                 # an own mark, stored by `close` from any thread
    cdef uint32_t *readers_word
    cdef uint32_t *writer_word
    cdef uint64_t *published_word
    cdef uint64_t *closing_word
    cdef uint64_t *writer_sleeps
    cdef uint64_t n_chunks, chunk_bytes, chunk_stride_bytes, chunks_offset
    cdef object layout
    cdef int pid
    cdef readonly uint64_t waits
    cdef uint64_t waited_ns

    def __cinit__(self, segment, *arguments):
        layout = segment.layout
        self.fork_count_at_start = fork_count
        self.pid = os.getpid()
        PyObject_GetBuffer(segment.data, &self.data_view, PyBUF_SIMPLE)
        PyObject_GetBuffer(segment.control, &self.control_view, PyBUF_SIMPLE)
        if self.data_view.len != layout.data_bytes or (
                self.control_view.len != layout.control_bytes):
            raise ValueError("the mappings do not have the sizes of the layout")
        self.layout = layout
        self.data = <char *>self.data_view.buf
        self.control = <char *>self.control_view.buf
        self.readers_word = <uint32_t *>(self.control + <size_t>layout.readers_word_offset)
        self.writer_word = <uint32_t *>(self.control + <size_t>layout.writer_word_offset)
        self.published_word = <uint64_t *>(self.data + <size_t>layout.published_offset)
        self.closing_word = <uint64_t *>(self.data + <size_t>layout.closing_offset)
        self.writer_sleeps = <uint64_t *>(self.data + <size_t>layout.writer_sleeps_offset)
        self.n_chunks = layout.n_chunks
        self.chunk_bytes = layout.chunk_bytes
        self.chunk_stride_bytes = layout.chunk_stride_bytes
        self.chunks_offset = layout.chunks_offset

    def __dealloc__(self):
        PyBuffer_Release(&self.data_view)
        PyBuffer_Release(&self.control_view)

    cdef inline int _check_not_forked(self) except -1:
        """Before each touch of the segment: a forked child, which may be in any state, has none."""
        if self.fork_count_at_start != fork_count:
            raise forked("end of a queue", self.pid)
        return 0

    cdef inline char *chunk(self, uint64_t sequence) noexcept nogil:
        return (self.data + self.chunks_offset
                + (sequence % self.n_chunks) * self.chunk_stride_bytes)

    cdef inline uint64_t *rank_word(self, int rank, size_t in_rank) except NULL:
        self._check_not_forked()
        if not 0 <= rank < self.layout.n_readers:
            raise ValueError(f"there is no rank {rank}")
        return <uint64_t *>(self.control + <size_t>self.layout.rank_offset(rank) + in_rank)

    cdef inline uint64_t *epoch_word(self, int rank) except NULL:
        self._check_not_forked()
        if not 0 <= rank < self.layout.n_readers:
            raise ValueError(f"there is no rank {rank}")
        return <uint64_t *>(self.data + <size_t>self.layout.epoch_offset(rank))

    @property
    def wait_s(self):
        """How many seconds this end has waited, all waits together."""
        return self.waited_ns / 1e9

    cdef void _stop(self, uint32_t *own_word) noexcept nogil:
        store_release(&self.is_stopped, 1)
        word_bump(own_word)
        wake_all(own_word)


@cython.final
cdef class RingWriter(_End):
    """The writer's side of a ring. One thread at a time, but for `stop` and the counters."""

    cdef int n_readers
    cdef int n_expected                      # how many ranks the writer waits for
    cdef uint64_t published
    cdef uint64_t cached_least               # the least cursor; stale until the ring looks full
    cdef uint64_t *cached_cursors            # per rank; stale likewise, a cursor only grows
    cdef uint64_t **cursors                  # per rank, NULL until it is admitted
    cdef uint64_t **sleeps
    cdef bint *is_expected
    cdef uint64_t *reserved_bytes            # per chunk
    cdef int64_t look_again_ns
    cdef int damaged_rank
    cdef readonly uint64_t bytes, oob_buffers, oob_bytes

    def __cinit__(self, segment, *arguments):
        cdef int rank
        self.n_readers = self.layout.n_readers
        self.n_expected = self.n_readers
        self.damaged_rank = -1
        self.cached_cursors = <uint64_t *>PyMem_Calloc(self.n_readers, sizeof(uint64_t))
        self.cursors = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.sleeps = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.is_expected = <bint *>PyMem_Calloc(self.n_readers, sizeof(bint))
        self.reserved_bytes = <uint64_t *>PyMem_Calloc(self.n_chunks, sizeof(uint64_t))
        if not (self.cached_cursors and self.cursors and self.sleeps and self.is_expected
                and self.reserved_bytes):
            raise MemoryError
        for rank in range(self.n_readers):
            # A rank that has never attached holds the ring at its cursor, which is 0.
            self.is_expected[rank] = True
            self.sleeps[rank] = self.rank_word(rank, self.layout.sleeps_in_rank)

    def __dealloc__(self):
        PyMem_Free(self.cached_cursors)
        PyMem_Free(self.cursors)
        PyMem_Free(self.sleeps)
        PyMem_Free(self.is_expected)
        PyMem_Free(self.reserved_bytes)

    @property
    def messages(self):
        """How many messages have been published."""
        return self.published

    cdef void _refresh(self) noexcept nogil:
        """Load the cursors of all admitted ranks that are waited for."""
        cdef uint64_t cursor, least = self.published
        cdef int rank
        for rank in range(self.n_readers):
            if not self.is_expected[rank]:
                continue
            if self.cursors[rank]:
                # Acquire pairs with the release store in RingReader.release: the reader's loads
                # from the chunk came before it.
                cursor = load_acquire(self.cursors[rank])
                if cursor > self.published:
                    self.damaged_rank = rank
                elif cursor > self.cached_cursors[rank]:
                    # A smaller one is the last store of an attachment that was struck; the rank's
                    # present one will store again.
                    self.cached_cursors[rank] = cursor
            if self.cached_cursors[rank] < least:
                least = self.cached_cursors[rank]
        self.cached_least = least

    cdef inline bint _has_space(self) noexcept nogil:
        if self.published - self.cached_least < self.n_chunks:
            return True
        self._refresh()
        return self.published - self.cached_least < self.n_chunks

    cdef int _claim(self, uint64_t needed_bytes, bint has_looked) except -1:
        self._check_not_forked()
        if not has_looked and monotonic_ns() >= self.look_again_ns:
            return LOOK
        if self.n_expected == 0:
            return NOBODY
        if not self._has_space():
            return FULL
        if needed_bytes > self.chunk_bytes:
            return TOO_LARGE
        if needed_bytes > self.reserved_bytes[self.published % self.n_chunks]:
            return RESERVE
        return DONE

    def try_claim(self, uint64_t needed_bytes, bint has_looked):
        """
        Whether a chunk is free and ready for an image of this size.

        Args:
            needed_bytes: the size of the image.
            has_looked: leave out the answer LOOK.
        """
        return self._claim(needed_bytes, has_looked)

    def try_publish(self, list stream not None, list buffers not None, bint has_looked=False):
        """
        Copy a message into the next chunk and publish it, if `try_claim` would say DONE.

        Args:
            stream: the pickle stream in parts, each exactly bytes.
            buffers: contiguous memoryviews of bytes.
            has_looked: as for `try_claim`.
        """
        cdef uint64_t size_bytes = image_size(stream, buffers)
        cdef int claim = self._claim(size_bytes, has_looked)
        if claim == DONE:
            fill_image(self.chunk(self.published), self.published, stream, buffers)
            self._count(stream, buffers)
            self._publish()
        return claim

    def publish_file(self, uint64_t nonce, list stream not None, list buffers not None):
        """Publish a message whose image lies in a memory file. The chunk has been claimed."""
        cdef ImageHeader *header = <ImageHeader *>self.chunk(self.published)
        self._check_not_forked()
        header.sequence = self.published
        header.kind = KIND_FILE
        header.stream_bytes = nonce
        header.n_buffers = image_size(stream, buffers)
        self._count(stream, buffers)
        self._publish()

    cdef void _count(self, list stream, list buffers) noexcept:
        cdef Py_ssize_t index
        cdef uint64_t length
        for index in range(PyList_GET_SIZE(stream)):
            self.bytes += <uint64_t>PyBytes_GET_SIZE(<object>PyList_GET_ITEM(stream, index))
        for index in range(PyList_GET_SIZE(buffers)):
            length = <uint64_t>buffer_of(buffers, index).len
            self.bytes += length
            self.oob_bytes += length
            self.oob_buffers += 1

    cdef void _publish(self) noexcept nogil:
        self.published += 1
        # Release pairs with the acquire load in RingReader: the chunk is written before it.
        store_release(self.published_word, self.published)
        self._wake_readers()

    cdef void _wake_readers(self) noexcept nogil:
        cdef int rank
        # This fence and the one in RingReader._sleep: either we see the mark, or it sees our store.
        fence_full()
        for rank in range(self.n_readers):
            if load_relaxed(self.sleeps[rank]):
                word_bump(self.readers_word)
                wake_all(self.readers_word)
                return

    def set_reserved(self, uint64_t size_bytes):
        """Say how many bytes of the next chunk can be written without SIGBUS."""
        self.reserved_bytes[self.published % self.n_chunks] = size_bytes

    def look_again_in(self, int64_t pause_ns):
        """Answer LOOK to a claim that comes after this pause."""
        self.look_again_ns = monotonic_ns() + pause_ns

    def wait_for_space(self, int64_t spin_ns, int64_t sleep_ns):
        """
        Wait until a chunk is free: poll first, then sleep once, with the GIL released.

        Returns early for a wake-up, a signal (whose handler has run) or `stop`.
        """
        cdef int64_t start_ns
        self._check_not_forked()
        with nogil:
            start_ns = monotonic_ns()
            if not self._poll_space(start_ns + spin_ns) and sleep_ns > 0:
                self._sleep_for_space(sleep_ns)
            self.waits += 1
            self.waited_ns += <uint64_t>(monotonic_ns() - start_ns)
        PyErr_CheckSignals()

    cdef bint _poll_space(self, int64_t until_ns) noexcept nogil:
        cdef int _round
        while monotonic_ns() < until_ns:
            for _round in range(POLLS_PER_CLOCK):
                if self._has_space():
                    return True
                pause_polling()
        return self._has_space()

    cdef void _sleep_for_space(self, int64_t sleep_ns) noexcept nogil:
        cdef uint32_t seen
        store_relaxed(self.writer_sleeps, 1)
        # This fence and the one in RingReader.release: either the reader sees the mark, or we see
        # its cursor.
        fence_full()
        seen = word_load_acquire(self.writer_word)
        if not self._has_space() and not load_acquire(&self.is_stopped):
            sleep_on(self.writer_word, seen, sleep_ns)
        store_relaxed(self.writer_sleeps, 0)

    def admit(self, int rank, bint is_first):
        """
        Wait for this rank from now on; returns the number of the message that it starts with.

        The first attachment of a rank starts with message 0, a later one with the next.
        """
        cdef uint64_t start = 0 if is_first else self.published
        cdef uint64_t *cursor = self.rank_word(rank, self.layout.cursor_in_rank)
        store_relaxed(self.sleeps[rank], 0)
        # The reader is not started yet: it learns of this by a message on the control socket.
        store_release(cursor, start)
        self.cursors[rank] = cursor
        self.cached_cursors[rank] = start
        if not self.is_expected[rank]:
            self.is_expected[rank] = True
            self.n_expected += 1
        return start

    def strike(self, int rank):
        """Never wait for the rank's present attachment again; its epoch ends with it."""
        self.new_epoch(rank)
        # The epoch is stored before any chunk that this reader has not released is written again:
        # pairs with the acquire fence in RingReader.release.
        fence_full()
        self.cursors[rank] = NULL
        store_relaxed(self.sleeps[rank], 0)  # a reader that was killed asleep left its mark
        if self.is_expected[rank]:
            self.is_expected[rank] = False
            self.n_expected -= 1
        if self.damaged_rank == rank:
            self.damaged_rank = -1
        self._refresh()

    def new_epoch(self, int rank):
        """Begin the rank's next epoch; returns its number. Every earlier attachment is over."""
        cdef uint64_t *word = self.epoch_word(rank)
        cdef uint64_t epoch = load_relaxed(word) + 1
        store_release(word, epoch)
        return epoch

    def has_left(self, int rank):
        """Whether the reader of the rank's present epoch has left."""
        return (load_acquire(self.rank_word(rank, self.layout.left_in_rank))
                == load_relaxed(self.epoch_word(rank)))

    def damaged(self):
        """The rank whose cursor is out of range, or None."""
        return None if self.damaged_rank < 0 else self.damaged_rank

    def lags(self):
        """How many messages each rank is behind, a tuple; 0 for a rank that is not waited for."""
        cdef int rank
        cdef uint64_t cursor
        self._check_not_forked()
        lags = []
        for rank in range(self.n_readers):
            cursor = self.cached_cursors[rank]
            if self.cursors[rank]:
                cursor = max(cursor, min(load_relaxed(self.cursors[rank]), self.published))
            lags.append(self.published - cursor if self.is_expected[rank] else 0)
        return tuple(lags)

    def stop(self):
        """End this end's waits, from any thread."""
        self._check_not_forked()
        with nogil:
            self._stop(self.writer_word)

    def say_closing(self):
        """Tell the readers that nothing follows. Nothing may be published afterwards."""
        self._check_not_forked()
        with nogil:
            # Release pairs with the acquire load in RingReader.is_closing: who sees the mark sees
            # the last published counter too.
            store_release(self.closing_word, 1)
            self._wake_readers()


@cython.final
cdef class RingReader(_End):
    """One reader's side of a ring. One thread at a time, but for `stop` and the counters."""

    cdef uint64_t cursor
    cdef uint64_t epoch
    cdef uint64_t *own_epoch_word
    cdef uint64_t *cursor_word
    cdef uint64_t *sleeps_word
    cdef uint64_t *left_word
    cdef uint64_t taken_bytes, taken_oob_buffers, taken_oob_bytes   # of the message not released
    cdef readonly uint64_t messages, bytes, oob_buffers, oob_bytes

    def __cinit__(self, segment, int rank, uint64_t epoch):
        self.epoch = epoch
        self.own_epoch_word = self.epoch_word(rank)
        self.cursor_word = self.rank_word(rank, self.layout.cursor_in_rank)
        self.sleeps_word = self.rank_word(rank, self.layout.sleeps_in_rank)
        self.left_word = self.rank_word(rank, self.layout.left_in_rank)

    def begin(self, uint64_t start):
        """Begin with message number `start`, which the writer has told."""
        self.cursor = start

    cdef inline uint64_t _available(self) noexcept nogil:
        # Acquire pairs with the release store in RingWriter._publish.
        return load_acquire(self.published_word) - self.cursor

    def try_take(self):
        """
        The next message, or None if there is none or this attachment is over.

        Returns one of these, and `release` gives the chunk back:

        * the stream, if it has no buffers;
        * (stream, list of buffers); the buffers are copies;
        * the nonce of the memory file that the message lies in, an int.

        A message that is taken and not released is taken again.

        Raises ProtocolError if the chunk is damaged.
        """
        cdef uint64_t available
        cdef ImageHeader header
        cdef const char *chunk
        self._check_not_forked()
        if load_relaxed(&self.is_stopped) or self._is_struck():
            return None
        available = self._available()
        if available == 0:
            return None
        if available > self.n_chunks:
            return self._damaged(f"number {self.cursor} is overwritten")
        chunk = self.chunk(self.cursor)
        memcpy(&header, chunk, sizeof(ImageHeader))
        self.taken_bytes = self.taken_oob_buffers = self.taken_oob_bytes = 0
        if header.sequence != self.cursor:
            return self._damaged(f"number {header.sequence} instead of {self.cursor}")
        if header.kind == KIND_FILE:
            taken = header.stream_bytes
        elif header.kind == KIND_HERE and header.n_buffers == 0 and (
                header.stream_bytes <= self.chunk_bytes - sizeof(ImageHeader)):
            self.taken_bytes = header.stream_bytes
            taken = self._stream(chunk + sizeof(ImageHeader), header.stream_bytes)
        else:
            taken = self._parts(chunk)
        # Everything that was loaded from the chunk comes before this load of the epoch; pairs with
        # the fence in RingWriter.strike. Without it what was taken may be torn, since the writer
        # does not wait for this reader.
        fence_acquire()
        return None if self._is_struck() else taken

    cdef inline bint _is_struck(self) noexcept nogil:
        return load_acquire(self.own_epoch_word) != self.epoch

    cdef object _damaged(self, str what):
        """Raise ProtocolError, unless the chunk may be torn since nobody waits for this reader."""
        if self._is_struck():
            return None
        raise damaged(what)

    cdef object _parts(self, const char *chunk):
        cdef uint64_t offset, length
        try:
            ranges = image_ranges(chunk, self.chunk_bytes, self.cursor)
        except ProtocolError:
            if self._is_struck():
                return None
            raise
        offset, length = ranges[0]
        self.taken_bytes = length
        stream = self._stream(chunk + offset, length)
        buffers = []
        for offset, length in ranges[1:]:
            buffers.append(self._copied(chunk + offset, length))
        return stream, buffers

    cdef bytes _stream(self, const char *address, uint64_t length):
        # A copy, not a view: loading runs code, which may fork, and the child has no chunk.
        stream = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
        copy(PyBytes_AS_STRING(stream), address, <size_t>length)
        return stream

    cdef object _copied(self, const char *address, uint64_t length):
        # The writer reuses the chunk, so what the caller keeps must be memory of its own.
        copied = PyByteArray_FromStringAndSize(NULL, <Py_ssize_t>length)
        copy(PyByteArray_AS_STRING(copied), address, <size_t>length)
        self.count_buffer(length)
        return copied

    def count_buffer(self, uint64_t length):
        """Count an out-of-band buffer of the message that was taken."""
        self.taken_bytes += length
        self.taken_oob_bytes += length
        self.taken_oob_buffers += 1

    def count_stream(self, uint64_t length):
        """Count the stream of the message that was taken, if it did not come by `try_take`."""
        self.taken_bytes += length

    def release(self):
        """
        Give the chunk back. Returns False if this attachment was struck: nobody waits for it.
        """
        self._check_not_forked()
        if self._is_struck():
            return False
        self.cursor += 1
        self.messages += 1
        self.bytes += self.taken_bytes
        self.oob_buffers += self.taken_oob_buffers
        self.oob_bytes += self.taken_oob_bytes
        # Release pairs with the acquire load in RingWriter._refresh.
        store_release(self.cursor_word, self.cursor)
        # This fence and the one in RingWriter._sleep_for_space.
        fence_full()
        if load_relaxed(self.writer_sleeps):
            self._wake_writer()
        return True

    cdef void _wake_writer(self) noexcept nogil:
        word_bump(self.writer_word)
        wake_all(self.writer_word)

    def wait(self, int64_t spin_ns, int64_t sleep_ns):
        """
        Wait for a message: poll first, then sleep once, with the GIL released.

        Returns early for a wake-up, a signal (whose handler has run), `stop` or a closing writer.
        """
        cdef int64_t start_ns
        self._check_not_forked()
        with nogil:
            start_ns = monotonic_ns()
            if not self._poll(start_ns + spin_ns) and sleep_ns > 0:
                self._sleep(sleep_ns)
            self.waits += 1
            self.waited_ns += <uint64_t>(monotonic_ns() - start_ns)
        PyErr_CheckSignals()

    cdef bint _poll(self, int64_t until_ns) noexcept nogil:
        cdef int _round
        while monotonic_ns() < until_ns:
            for _round in range(POLLS_PER_CLOCK):
                if self._available():
                    return True
                pause_polling()
        return self._available() != 0

    cdef void _sleep(self, int64_t sleep_ns) noexcept nogil:
        cdef uint32_t seen
        store_relaxed(self.sleeps_word, 1)
        # This fence and the one in RingWriter._wake_readers: either the writer sees the mark, or
        # we see its store.
        fence_full()
        seen = word_load_acquire(self.readers_word)
        if (self._available() == 0 and not load_acquire(self.closing_word)
                and not load_acquire(&self.is_stopped)):
            sleep_on(self.readers_word, seen, sleep_ns)
        store_relaxed(self.sleeps_word, 0)

    @property
    def lag(self):
        """How many messages are published and not yet released."""
        self._check_not_forked()
        return self._available()

    @property
    def next_sequence(self):
        """The number of the message that comes next."""
        return self.cursor

    @property
    def is_struck(self):
        """Whether the writer has ended this attachment."""
        self._check_not_forked()
        return self._is_struck()

    @property
    def is_closing(self):
        """Whether the writer has closed. Look at `lag` after it, not before: the tail counts."""
        self._check_not_forked()
        # Acquire pairs with the release store in RingWriter.say_closing.
        return load_acquire(self.closing_word) != 0

    def stop(self):
        """End this end's waits, from any thread."""
        self._check_not_forked()
        with nogil:
            self._stop(self.readers_word)

    def leave(self):
        """Tell the writer not to wait for this attachment any more. Nothing may follow."""
        self._check_not_forked()
        store_release(self.left_word, self.epoch)
        with nogil:
            self._wake_writer()
