# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: auto_pickle=False, autotestdict=False
# cython: embedsignature=True, embedsignature.format=python
"""
The hot loops: copy a message into its chunk, publish it, poll, sleep, take it, release it.

No policy, no pickle, no sockets: callers hold the lock of their end, and decide what a full ring or
a silent writer means. `layout` says who owns which word; an image, as it lies in a chunk or in a
memory file, is written and parsed here alone::

    ┌──────────┬──────┬──────────────┬───────────┬──────┬─────────────────┬────────┬─ ─┬──────────
    │ sequence │ kind │ stream_bytes │ n_buffers │ slot │ length, offset, │ stream │   │ buffer 0 …
    │          │      │              │           │      │ slot of each …  │        │   │
    └──────────┴──────┴──────────────┴───────────┴──────┴─────────────────┴────────┴─ ─┴──────────
      8 bytes    8      8              8           8      24 a buffer            at multiples of 64

A buffer in a block has its offset in the data file and the block's slot in the table; any other has
0 there and lies in the image. Buffers that share a block follow each other in it, from its start on
and at multiples of 64. Where `kind` says that the image lies elsewhere, the
chunk ends after the header. In a block: `stream_bytes` is its offset in the data file, `n_buffers`
the image's size, `slot` the block's. In a memory file: `stream_bytes` is its nonce.
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
    count_up, fence_acquire, fence_full, load_acquire, load_relaxed, pause_polling, raise_to,
    store_relaxed, store_release, word_bump, word_load_acquire,
)

import mmap
import os

from shmcast.errors import ProtocolError, QueueClosed, ShmcastError


cdef extern from *:
    """
    #include <fcntl.h>
    #include <limits.h>
    #include <linux/futex.h>
    #include <pthread.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    enum { PAGEMAP_ENTRIES = 512 };

    /* How many forks lie between this process and the one that loaded the module. Handlers of the
     * C library see every fork, also one that Python does not know of. */
    static unsigned long fork_count;

    enum { BEFORE_FORK, IN_PARENT, IN_CHILD };
    static void (*at_fork)(int moment);
    static _Thread_local int fork_has_gil;

    /* Held while a mapping is replaced, so that a fork comes before or after that. */
    static pthread_mutex_t fork_mutex = PTHREAD_MUTEX_INITIALIZER;

    /* Python's own hooks would come too early: other threads run between these and the fork. A fork
     * without the GIL comes from a library, and what it leaves in the child is not for Python. */
    static void before_fork(void) {
        pthread_mutex_lock(&fork_mutex);
        PyThreadState *current = _PyThreadState_UncheckedGet();
        /* Before Python 3.12 that is the thread that has the GIL, which may be another one. */
        fork_has_gil = current && current->thread_id == PyThread_get_thread_ident();
        if (fork_has_gil)
            at_fork(BEFORE_FORK);
    }

    static void after_fork_in_parent(void) {
        if (fork_has_gil)
            at_fork(IN_PARENT);
        pthread_mutex_unlock(&fork_mutex);
    }

    static void after_fork_in_child(void) {
        fork_count++;
        if (fork_has_gil)
            at_fork(IN_CHILD);
        pthread_mutex_unlock(&fork_mutex);
    }

    static int watch_forks(void (*handler)(int moment)) {
        at_fork = handler;
        return pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    }

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

    static size_t whole_pages(size_t n_bytes) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        return (n_bytes + page - 1) / page * page;
    }

    static void *map_arena(int descriptor, uint64_t offset, size_t n_bytes) {
        void *address = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                             descriptor, (off_t)offset);
        if (address == MAP_FAILED)
            return NULL;
        if (madvise(address, n_bytes, MADV_DONTDUMP) || madvise(address, n_bytes, MADV_DONTFORK)) {
            munmap(address, n_bytes);
            return NULL;
        }
        return address;
    }

    /* Drop those pages of a private mapping that became private, so that they show the file again;
     * the others stay mapped, which saves their next faults. Whether it worked. */
    static int drop_private_pages(char *address, size_t n_bytes) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        const size_t n_pages = (n_bytes + page - 1) / page;
        uint64_t entries[PAGEMAP_ENTRIES];
        size_t done, index, count, run = 0;
        int dropped = 1, pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
        for (done = 0; done < n_pages && pagemap >= 0; done += count) {
            count = n_pages - done < PAGEMAP_ENTRIES ? n_pages - done : PAGEMAP_ENTRIES;
            if (pread(pagemap, entries, count * 8, (off_t)(((size_t)address / page + done) * 8))
                    != (ssize_t)(count * 8))
                break;
            for (index = 0; index <= count; index++) {
                /* Bit 63: in memory, 62: swapped out, 61: the file's own page. */
                if (index < count && entries[index] >> 62 && !(entries[index] >> 61 & 1))
                    run++;
                else if (run) {
                    if (madvise(address + (done + index - run) * page, run * page, MADV_DONTNEED))
                        dropped = 0;
                    run = 0;
                }
            }
        }
        if (pagemap >= 0)
            close(pagemap);
        if (done < n_pages
                && madvise(address + done * page, (n_pages - done) * page, MADV_DONTNEED))
            dropped = 0;
        return dropped;
    }

    /* Make every page private, without changing a byte. */
    static void make_private(char *address, size_t n_bytes) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        size_t offset;
        if (!madvise(address, whole_pages(n_bytes), 23 /* MADV_POPULATE_WRITE, since Linux 5.14 */))
            return;
        for (offset = 0; offset < n_bytes; offset += page) {
            /* Atomic, since another thread may write there at the same time. */
            __atomic_fetch_add(address + offset, 0, __ATOMIC_RELAXED);
        }
    }

    static void set_inherited(char *address, size_t n_bytes, int is_inherited) {
        madvise(address, whole_pages(n_bytes), is_inherited ? MADV_DOFORK : MADV_DONTFORK);
    }

    /* A second mapping of a part of a shared one, writable in spite of the file's seals. Its pages
     * are mapped at once: a fault for each, when it is written to, takes five times as long. */
    static void *map_again(char *address, size_t n_bytes) {
        void *again = mremap(address, 0, n_bytes, MREMAP_MAYMOVE);
        if (again == MAP_FAILED)
            return NULL;
        madvise(again, n_bytes, 22 /* MADV_POPULATE_READ, since Linux 5.14 */);
        return again;
    }

    /* Replace a shared mapping by a private one of the same bytes. What was mapped moves to
     * `*moved`, NULL if it can't. Returns an errno: then nobody can use the mapping any more. */
    static int map_privately(char *address, size_t n_bytes, int descriptor, uint64_t offset,
                             void **moved, int *is_detached) {
        int failure = 0;
        pthread_mutex_lock(&fork_mutex);
        *is_detached = 1;
        /* The range is never unmapped: another thread could get it. Without this the next line
         * would unmap every page, which takes 4 ms for 60 MiB; moving them takes 0.2. */
        *moved = mremap(address, n_bytes, n_bytes, MREMAP_MAYMOVE | 4 /* MREMAP_DONTUNMAP */, NULL);
        if (*moved == MAP_FAILED)
            *moved = NULL;
        if (mmap(address, n_bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_NORESERVE,
                 descriptor, (off_t)offset) == MAP_FAILED) {
            failure = errno;
            mprotect(address, n_bytes, PROT_NONE);
        } else
            madvise(address, n_bytes, MADV_DONTDUMP);
        pthread_mutex_unlock(&fork_mutex);
        return failure;
    }

    static void *copy_of(const char *address, size_t n_bytes) {
        void *copy = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                          0);
        return copy == MAP_FAILED ? NULL : memcpy(copy, address, n_bytes);
    }

    /* Into the place of another mapping, which must not stay. */
    static void move_to(void *from, void *to, size_t n_bytes) {
        if (mremap(from, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED)
            mprotect(to, n_bytes, PROT_NONE);
    }

    static inline void wake_all(uint32_t *word) {
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    """
    unsigned long fork_count
    enum:
        BEFORE_FORK
        IN_PARENT
        IN_CHILD
    int watch_forks(void (*handler)(int moment) noexcept) noexcept
    int64_t monotonic_ns() noexcept nogil
    void sleep_on(const uint32_t *word, uint32_t expected, int64_t sleep_ns) noexcept nogil
    void wake_all(uint32_t *word) noexcept nogil
    void *map_file(int descriptor, size_t n_bytes, bint shared, bint writable) noexcept nogil
    void *map_arena(int descriptor, uint64_t offset, size_t n_bytes) noexcept nogil
    bint drop_private_pages(char *address, size_t n_bytes) noexcept nogil
    void make_private(char *address, size_t n_bytes) noexcept nogil
    void set_inherited(char *address, size_t n_bytes, bint is_inherited) noexcept nogil
    size_t whole_pages(size_t n_bytes) noexcept nogil
    void *map_again(char *address, size_t n_bytes) noexcept nogil
    int map_privately(char *address, size_t n_bytes, int descriptor, uint64_t offset,
                      void **moved, int *is_detached) noexcept nogil
    void *copy_of(const char *address, size_t n_bytes) noexcept nogil
    void move_to(void *source, void *target, size_t n_bytes) noexcept nogil
    int unmap "munmap"(void *address, size_t n_bytes) noexcept nogil


cdef struct Link:
    # An object's place in a list that does not count references: the object's end takes it out.
    Link *next
    Link *previous
    void *owner


cdef void link_in(Link **newest, Link *link, void *owner) noexcept:
    """Put an object at the front of a list."""
    link.owner, link.next, link.previous = owner, newest[0], NULL
    if newest[0] is not NULL:
        newest[0].previous = link
    newest[0] = link


cdef void link_out(Link **newest, Link *link) noexcept:
    """Take an object out of its list."""
    if link.previous is NULL:
        newest[0] = link.next
    else:
        link.previous.next = link.next
    if link.next is not NULL:
        link.next.previous = link.previous


cdef Link *newest_leases = NULL          # of all `Leases`
cdef Link *newest_draft = NULL           # of all drafts


cdef void at_fork(int moment) noexcept:
    """Let a forked child keep what it sees; the GIL is held from the first moment to the last."""
    cdef Link *link = newest_leases
    while link is not NULL and moment == BEFORE_FORK:
        (<Leases>link.owner).keep()
        link = link.next
    link = newest_draft
    while link is not NULL:
        if moment == BEFORE_FORK:
            (<Draft>link.owner).before_fork()
        else:
            (<Draft>link.owner).after_fork(moment == IN_CHILD)
        link = link.next


if watch_forks(at_fork):
    raise MemoryError("pthread_atfork failed")


cpdef enum:
    BUFFER_ALIGNMENT = 64

cdef enum:
    POLLS_PER_CLOCK = 64          # about a microsecond of pauses; then clock and CPU are asked
    GIL_COPY_BYTES = 16384        # a shorter copy costs less than giving up the GIL
    KIND_HERE = 1
    KIND_FILE = 2
    KIND_BLOCK = 3
    MOST_WINDOWS = 16

# What `try_claim` answers.
cpdef enum Claim:
    DONE = 0        # a chunk is free and ready
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
    uint64_t slot


cdef struct BufferEntry:
    uint64_t length
    uint64_t offset                # in the data file, in a block; 0: it lies in the image
    uint64_t slot


cdef struct Window:
    char *address                  # of a second mapping of a block, which no draft uses; NULL: none
    size_t n_bytes
    uint64_t offset                # of the block in the data file


IMAGE_HEADER_BYTES = sizeof(ImageHeader)
cdef uint64_t PAGE_BYTES = mmap.PAGESIZE
cdef list NO_PLACES = []


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


cdef extern from "<sched.h>" nogil:
    int sched_getcpu()

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


cdef int check_places(list places, Py_ssize_t n_buffers) except -1:
    if PyList_GET_SIZE(places) not in (0, n_buffers):
        raise ValueError(f"{len(places)} places for {n_buffers} buffers")
    return 0


cdef inline bint has_block(list places, Py_ssize_t index) noexcept:
    """Whether the buffer's place is a block; no places at all: none is."""
    return PyList_GET_SIZE(places) != 0 and <object>PyList_GET_ITEM(places, index) is not None


cdef int64_t image_size(list stream, list buffers, list places) except -1:
    """The image's size. Buffers whose place is a block are not in it."""
    cdef uint64_t size_bytes = sizeof(ImageHeader)
    cdef Py_ssize_t index, n_buffers = PyList_GET_SIZE(buffers)
    check_places(places, n_buffers)
    size_bytes += sizeof(BufferEntry) * <uint64_t>n_buffers
    for index in range(PyList_GET_SIZE(stream)):
        size_bytes += <uint64_t>PyBytes_GET_SIZE(<object>PyList_GET_ITEM(stream, index))
    for index in range(n_buffers):
        if not has_block(places, index):
            size_bytes = aligned(size_bytes) + <uint64_t>buffer_of(buffers, index).len
    return <int64_t>size_bytes


cdef uint64_t head_bytes(list buffers) noexcept:
    return sizeof(ImageHeader) + sizeof(BufferEntry) * <uint64_t>PyList_GET_SIZE(buffers)


cdef int fill_head(char *head, uint64_t sequence, uint64_t stream_bytes, list buffers,
                   list places) except -1:
    """Write the first part of an image, its header and the table."""
    cdef ImageHeader *header = <ImageHeader *>head
    cdef BufferEntry *table = <BufferEntry *>(head + sizeof(ImageHeader))
    cdef Py_ssize_t index, n_buffers = PyList_GET_SIZE(buffers)
    header.sequence = sequence
    header.kind = KIND_HERE
    header.stream_bytes = stream_bytes
    header.n_buffers = <uint64_t>n_buffers
    header.slot = 0
    for index in range(n_buffers):
        table[index].length = <uint64_t>buffer_of(buffers, index).len
        if has_block(places, index):
            table[index].offset, table[index].slot = places[index]
        else:
            table[index].offset = table[index].slot = 0
    return 0


cdef int fill_image(char *image, uint64_t sequence, list stream, list buffers,
                    list places) except -1:
    """Write an image; `image_size` bytes are there. The lists pin their members."""
    cdef Py_ssize_t index, length
    cdef uint64_t start = head_bytes(buffers)
    cdef uint64_t offset = start
    cdef Py_buffer *view
    for index in range(PyList_GET_SIZE(stream)):
        part = <object>PyList_GET_ITEM(stream, index)
        length = PyBytes_GET_SIZE(part)
        copy(image + offset, PyBytes_AS_STRING(part), <size_t>length)
        offset += <uint64_t>length
    fill_head(image, sequence, offset - start, buffers, places)
    for index in range(PyList_GET_SIZE(buffers)):
        if not has_block(places, index):
            view = buffer_of(buffers, index)
            offset = aligned(offset)
            copy(image + offset, <const char *>view.buf, <size_t>view.len)
            offset += <uint64_t>view.len
    return 0


cdef object damaged(str what):
    return ProtocolError(f"a message is damaged: {what}")


cdef object image_ranges(const char *image, uint64_t limit_bytes, uint64_t sequence,
                         uint64_t arena_offset, uint64_t data_bytes, uint64_t n_slots):
    """
    Where the stream and each buffer lie, as a list of (offset, length, slot).

    A slot is -1 for what lies in the image; any other range is one of the data file. Every number
    is read once and checked before it is used.
    """
    cdef ImageHeader header
    cdef BufferEntry entry
    cdef uint64_t index, offset
    if limit_bytes < sizeof(ImageHeader):
        raise damaged(f"{limit_bytes} bytes hold no header")
    memcpy(&header, image, sizeof(ImageHeader))
    if header.kind != KIND_HERE or header.sequence != sequence:
        raise damaged(f"kind {header.kind}, number {header.sequence} instead of {sequence}")
    if header.n_buffers > (limit_bytes - sizeof(ImageHeader)) // sizeof(BufferEntry):
        raise damaged(f"{header.n_buffers} buffers in {limit_bytes} bytes")
    offset = sizeof(ImageHeader) + sizeof(BufferEntry) * header.n_buffers
    if header.stream_bytes > limit_bytes - offset:
        raise damaged(f"a stream of {header.stream_bytes} bytes in {limit_bytes} bytes")
    ranges = [(offset, header.stream_bytes, -1)]
    offset += header.stream_bytes
    for index in range(header.n_buffers):
        memcpy(&entry, image + sizeof(ImageHeader) + sizeof(BufferEntry) * index,
               sizeof(BufferEntry))
        if entry.offset:
            check_block(entry.offset, entry.length, entry.slot, arena_offset, data_bytes, n_slots)
            ranges.append((entry.offset, entry.length, entry.slot))
            continue
        offset = aligned(offset)
        if offset > limit_bytes or entry.length > limit_bytes - offset:
            raise damaged(f"a buffer of {entry.length} bytes at {offset} in {limit_bytes} bytes")
        ranges.append((offset, entry.length, -1))
        offset += entry.length
    return ranges


cdef int check_block(uint64_t offset, uint64_t length, uint64_t slot, uint64_t arena_offset,
                     uint64_t data_bytes, uint64_t n_slots) except -1:
    if (offset < arena_offset or offset > data_bytes or length > data_bytes - offset
            or offset % BUFFER_ALIGNMENT or slot >= n_slots):
        raise damaged(f"a block of {length} bytes at {offset}, slot {slot}")
    return 0


cdef dict block_spans(list ranges):
    """
    From where to where each block of these ranges is used, by slot.

    None if ranges of one slot do not follow each other: of a block that is leased twice, the first
    lease to end would give up the other's too.
    """
    cdef dict spans = {}
    cdef uint64_t offset, length
    for offset, length, slot in ranges:
        if slot < 0:
            continue
        start, end = spans.get(slot, (offset, offset))
        if offset != aligned(end) or start % PAGE_BYTES:
            return None
        spans[slot] = start, offset + length
    return spans


def image_bytes(list stream not None, list buffers not None, list places=None):
    """How many bytes the image of this message takes."""
    return image_size(stream, buffers, NO_PLACES if places is None else places)


def image_pieces(uint64_t sequence, list stream not None, list buffers not None):
    """
    The image of a message for a file that reads as zeros: a list of (offset, bytes or memoryview).

    `image_bytes` says where it ends.
    """
    cdef uint64_t start = head_bytes(buffers)
    cdef uint64_t offset = start
    cdef Py_ssize_t index
    head = bytearray(start)
    pieces = [(0, head)]
    for part in stream:
        pieces.append((offset, part))
        offset += <uint64_t>len(part)
    fill_head(PyByteArray_AS_STRING(head), sequence, offset - start, buffers, NO_PLACES)
    for index in range(len(buffers)):
        offset = aligned(offset)
        pieces.append((offset, buffers[index]))
        offset += <uint64_t>buffer_of(buffers, index).len
    return pieces


def read_image(image not None, uint64_t sequence):
    """
    The stream and the list of buffers of an image that has no blocks, as views of it.

    Raises ProtocolError if it is damaged.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(image, &view, PyBUF_SIMPLE)
    try:
        ranges = image_ranges(<const char *>view.buf, <uint64_t>view.len, sequence, 1, 0, 0)
    finally:
        PyBuffer_Release(&view)
    whole = memoryview(image)
    views = [whole[offset : offset + length] for offset, length, _ in ranges]
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
    LONGEST_STEP_US = 100000


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
    that. `with lock.step(error):` takes one for what the end owes to others, at once or not at all;
    such a turn never waits, so that callers wait for its end whatever their deadline. It is
    compiled, since a signal between the turn and the next Python instruction would leave a lock
    behind that nobody gives back.

    Args:
        role: what errors call the end, such as "writer".
        on_free: called after a turn in which a step was wanted.

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
    cdef bint is_step                       # whether the present turn is one
    cdef uint64_t steps_wanted              # how often a step found the end in use, and how often
    cdef uint64_t steps_told                # `on_free` was called for that
    cdef uint32_t n_turns                   # that have ended; waited for by n_waiting threads
    cdef int n_waiting
    cdef list deferred                      # calls to be made after the turn, or None
    cdef object role, on_free, finish
    cdef readonly int pid

    def __cinit__(self, str role not None, on_free not None):
        self.lock = PyThread_allocate_lock()
        if self.lock is NULL:
            raise MemoryError
        self.role = role
        self.on_free = on_free
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
        return _Turn(self, deadline_s, error, False)

    def step(self, error):
        """A turn for a step, if the end is not in use; else `error` is raised."""
        return _Turn(self, 0.0, error, True)

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
                if not self.is_step and 0 <= deadline_s < FOREVER_S:
                    left_us = max(0, <int64_t>(deadline_s * 1e6) - monotonic_ns() // 1000)
                with nogil:
                    status = PyThread_acquire_lock_timed(self.lock, left_us, 1)
                if status == PY_LOCK_INTR:
                    PyErr_CheckSignals()
                elif status == PY_LOCK_FAILURE and left_us == 0 and not self.is_step:
                    raise error(f"another thread did not end its call on this {self.role} in time")
        return self._enter_as(False)

    cdef int _enter_step(self, error) except -1:
        self._check_not_forked()
        self._check_open()
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            self.steps_wanted += 1  # the GIL is held from the try to here
            raise error(f"this {self.role} is in use")
        return self._enter_as(True)

    cdef inline int _enter_as(self, bint is_step) except -1:
        self.owner = PyThread_get_thread_ident()
        self.is_step = is_step
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
        self.is_step = False
        PyThread_release_lock(self.lock)
        # `close` marks first and tries the lock then, we release first and look then: one of the
        # two closes the end.
        fence_full()
        if load_relaxed(&self.closing):
            self._try_finish()
        self._announce()
        if self.steps_told != self.steps_wanted:
            self._tell_steps()
        if self.deferred is not None:
            self._call_deferred()
        return 0

    cdef inline void _announce(self) noexcept:
        self.n_turns += 1  # under the GIL, as every store of it
        if self.n_waiting:
            wake_all(&self.n_turns)

    cdef int _tell_steps(self) except -1:
        # Counted after the call, which a signal may interrupt: then it is made again.
        cdef uint64_t wanted = self.steps_wanted
        self.on_free()
        self.steps_told = wanted
        return 0

    cdef int _call_deferred(self) except -1:
        deferred, self.deferred = self.deferred, None
        for call in deferred:
            call()
        return 0

    def defer(self, call not None):
        """Make a call after the present turn, such as one that may wait for another thread."""
        if self.deferred is None:
            self.deferred = []
        self.deferred.append(call)

    @property
    def turns(self):
        """How many turns have ended."""
        return self.n_turns

    def wait_for_turn(self, uint32_t turns, double sleep_s):
        """
        Sleep until more turns have ended than these, or `close` was called.

        Returns early for a signal, whose handler has run.
        """
        cdef int64_t sleep_ns = <int64_t>(sleep_s * 1e9)
        self._check_not_forked()
        self.n_waiting += 1
        with nogil:
            if not load_acquire(&self.closing):
                sleep_on(&self.n_turns, turns, sleep_ns)
        self.n_waiting -= 1
        PyErr_CheckSignals()

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
        if self.is_step and self.owner != PyThread_get_thread_ident():
            self._wait_for_step()
        self._try_finish()
        self._announce()

    cdef void _wait_for_step(self) noexcept:
        # So that what was open is closed when `close` returns. A step never waits, unless for what
        # this thread itself holds: the garbage collector or a signal may close an end anywhere.
        with nogil:
            if PyThread_acquire_lock_timed(self.lock, LONGEST_STEP_US, 0) == PY_LOCK_ACQUIRED:
                PyThread_release_lock(self.lock)

    cdef int _try_finish(self) except -1:
        if self.fork_count_at_start != fork_count or self.is_finished:
            return 0
        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):
            return 0
        self.owner, self.is_step = PyThread_get_thread_ident(), True
        try:
            if not self.is_finished:
                self.finish()
                self.is_finished = True
                self.finish = None
        finally:
            self.owner, self.is_step = 0, False
            PyThread_release_lock(self.lock)
        return 0


@cython.final
cdef class _Turn:
    cdef EndLock lock
    cdef double deadline_s
    cdef object error
    cdef bint is_step

    def __cinit__(self, EndLock lock, double deadline_s, error, bint is_step):
        self.lock = lock
        self.deadline_s = deadline_s
        self.error = error
        self.is_step = is_step

    def __enter__(self):
        error = self.error
        if self.is_step:
            self.lock._enter_step(error)
        else:
            self.lock._enter(self.deadline_s, error)

    def __exit__(self, kind, error, traceback):
        self.lock._leave()


cdef inline uint64_t this_cpu() noexcept nogil:
    """1 + the CPU that this thread runs on; it may be on another one a moment later."""
    return <uint64_t>(sched_getcpu() + 1)


@cython.no_gc_clear  # a garbage cycle must not drop what the views pin before they are released
cdef class _End:
    """What both ends have: the two mappings, pinned for as long as the object lives."""

    cdef Py_buffer data_view
    cdef Py_buffer control_view
    cdef char *data
    cdef char *control
    cdef unsigned long fork_count_at_start
    cdef uint64_t is_stopped                 # own marks, stored from any thread: by `close`
    cdef uint64_t is_nudged                  # and by `nudge`
    cdef uint32_t *readers_word
    cdef uint32_t *writer_word
    cdef uint64_t *published_word
    cdef uint64_t *writer_cpu
    cdef uint64_t *closing_word
    cdef uint64_t *writer_sleeps
    cdef uint64_t *failure_word
    cdef uint64_t most_failure_bytes
    cdef uint64_t *guard_word
    cdef uint64_t n_chunks, chunk_bytes, chunk_stride_bytes, chunks_offset
    cdef uint64_t arena_offset, data_bytes, n_slots
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
        self.writer_cpu = <uint64_t *>(self.data + <size_t>layout.writer_cpu_offset)
        self.closing_word = <uint64_t *>(self.data + <size_t>layout.closing_offset)
        self.writer_sleeps = <uint64_t *>(self.data + <size_t>layout.writer_sleeps_offset)
        self.failure_word = <uint64_t *>(self.data + <size_t>layout.failure_offset)
        self.most_failure_bytes = layout.epochs_offset - layout.failure_offset - sizeof(uint64_t)
        self.n_chunks = layout.n_chunks
        self.chunk_bytes = layout.chunk_bytes
        self.chunk_stride_bytes = layout.chunk_stride_bytes
        self.chunks_offset = layout.chunks_offset
        self.arena_offset = layout.arena_offset
        self.data_bytes = layout.data_bytes
        self.n_slots = layout.n_slots
        if self.n_slots:
            self.guard_word = <uint64_t *>(self.data + <size_t>layout.guard_offset)

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

    cdef void _count_wait(self, int64_t start_ns) noexcept:
        # With the GIL, since `stats` may read these in another thread at the same time.
        self.waits += 1
        self.waited_ns += <uint64_t>(monotonic_ns() - start_ns)

    cdef inline bint _is_told(self) noexcept nogil:
        """Whether a wait is to end, by `stop` or `nudge`."""
        return load_acquire(&self.is_stopped) or load_acquire(&self.is_nudged)

    cdef void _mark(self, uint64_t *mark, uint32_t *own_word) noexcept nogil:
        store_release(mark, 1)
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
    cdef uint64_t **cpus                     # per rank: where it finished a message last
    cdef uint64_t **given_up_words           # per rank, a word for each slot
    cdef uint64_t **given_ups_words
    cdef uint64_t **held_uses                # per rank and slot, the use to give up; 0 for none
    cdef uint64_t *seen_given_ups            # per rank, when no held use was given up
    cdef int n_slots_used                    # no slot from this one on was ever held
    cdef bint *is_expected
    cdef uint64_t *reserved_bytes            # per chunk
    cdef int64_t look_again_ns
    cdef int damaged_rank
    cdef readonly uint64_t ended_drafts
    cdef Window windows[MOST_WINDOWS]        # kept, since mapping the pages of a new one takes ms
    cdef int next_window
    cdef readonly uint64_t bytes, oob_buffers, oob_bytes

    def __cinit__(self, segment, *arguments):
        cdef int rank
        self.n_readers = self.layout.n_readers
        self.n_expected = self.n_readers
        self.damaged_rank = -1
        self.cached_cursors = <uint64_t *>PyMem_Calloc(self.n_readers, sizeof(uint64_t))
        self.cursors = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.sleeps = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.cpus = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.given_up_words = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.given_ups_words = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.held_uses = <uint64_t **>PyMem_Calloc(self.n_readers, sizeof(void *))
        self.seen_given_ups = <uint64_t *>PyMem_Calloc(self.n_readers, sizeof(uint64_t))
        self.is_expected = <bint *>PyMem_Calloc(self.n_readers, sizeof(bint))
        self.reserved_bytes = <uint64_t *>PyMem_Calloc(self.n_chunks, sizeof(uint64_t))
        if not (self.cached_cursors and self.cursors and self.sleeps and self.cpus
                and self.given_up_words and self.given_ups_words and self.held_uses
                and self.seen_given_ups and self.is_expected and self.reserved_bytes):
            raise MemoryError
        for rank in range(self.n_readers):
            # A rank that has never attached holds the ring at its cursor, which is 0.
            self.is_expected[rank] = True
            self.sleeps[rank] = self.rank_word(rank, self.layout.sleeps_in_rank)
            self.cpus[rank] = self.rank_word(rank, self.layout.cpu_in_rank)
            self.given_up_words[rank] = <uint64_t *>(
                self.control + <size_t>self.layout.rank_given_up_offset(rank))
            self.given_ups_words[rank] = self.rank_word(rank, self.layout.given_ups_in_rank)
            self.held_uses[rank] = <uint64_t *>PyMem_Calloc(self.n_slots, sizeof(uint64_t))
            if self.held_uses[rank] is NULL:
                raise MemoryError

    def __dealloc__(self):
        cdef int index
        PyMem_Free(self.cached_cursors)
        PyMem_Free(self.cursors)
        PyMem_Free(self.sleeps)
        PyMem_Free(self.cpus)
        PyMem_Free(self.given_up_words)
        PyMem_Free(self.given_ups_words)
        if self.held_uses is not NULL:
            for index in range(self.n_readers):
                PyMem_Free(self.held_uses[index])
        PyMem_Free(self.held_uses)
        PyMem_Free(self.seen_given_ups)
        PyMem_Free(self.is_expected)
        PyMem_Free(self.reserved_bytes)
        if self.fork_count_at_start == fork_count:  # a forked child has none
            for index in range(MOST_WINDOWS):
                drop_window(&self.windows[index])

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
                # Acquire pairs with the release store in RingReader._give_back: the reader's loads
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

    cdef inline bint _has_space(self, uint64_t n_free) noexcept nogil:
        """Whether so many chunks are free; all of them are when everything has been read."""
        if self.published - self.cached_least + n_free <= self.n_chunks:
            return True
        self._refresh()
        return self.published - self.cached_least + n_free <= self.n_chunks

    cdef int _claim(self, uint64_t needed_bytes, bint has_looked) except -1:
        self._check_not_forked()
        if not has_looked and monotonic_ns() >= self.look_again_ns:
            return LOOK
        if self.n_expected == 0:
            return NOBODY
        if not self._has_space(1):
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

        Returns whether it was published.
        """
        if self._claim(<uint64_t>image_size(stream, buffers, NO_PLACES), has_looked) != DONE:
            return False
        fill_image(self.chunk(self.published), self.published, stream, buffers, NO_PLACES)
        self._count(stream, buffers)
        self._publish()
        return True

    def publish(self, list stream not None, list buffers not None, list places not None,
                tuple block, list drafts not None, int data_descriptor):
        """
        Publish a message into a chunk that has been claimed for its image.

        Args:
            stream: as for `try_publish`, like `buffers`.
            buffers: those with a place in a block are there already.
            places: (offset, slot) of the block of each buffer, or None for one that is copied into
                the image.
            block: (offset, slot) of the block that the image is copied to, or None for the chunk.
            drafts: those that are published; they are detached before this returns.
            data_descriptor: of the data file.

        Raises:
            OSError: the message was published, but a draft cannot be used any more.
        """
        cdef ImageHeader *header = <ImageHeader *>self.chunk(self.published)
        cdef uint64_t size_bytes = <uint64_t>image_size(stream, buffers, places)
        cdef uint64_t offset, slot
        cdef int failure = 0
        self._check_not_forked()
        if block is None:
            if size_bytes > self.chunk_bytes:
                raise ValueError(f"{size_bytes} bytes do not fit a chunk")
            fill_image(<char *>header, self.published, stream, buffers, places)
        else:
            offset, slot = block
            check_block(offset, size_bytes, slot, self.arena_offset, self.data_bytes, self.n_slots)
            fill_image(self.data + offset, self.published, stream, buffers, places)
            header.sequence = self.published
            header.kind = KIND_BLOCK
            header.stream_bytes = offset
            header.n_buffers = size_bytes
            header.slot = slot
        self._count(stream, buffers)
        self._publish()
        # First published, since this takes milliseconds. In one call, so that no signal comes
        # between: the caller could go on writing into what is published.
        for draft in drafts:
            failure = (<Draft?>draft).detach(data_descriptor) or failure
        if failure:
            raise OSError(failure, os.strerror(failure))

    def copy_to_block(self, uint64_t offset, source not None):
        """Copy a memoryview of bytes to this offset of the arena, with the GIL released."""
        cdef Py_buffer *view = PyMemoryView_GET_BUFFER(source)
        self._check_not_forked()
        check_block(offset, <uint64_t>view.len, 0, self.arena_offset, self.data_bytes, self.n_slots)
        copy(self.data + offset, <const char *>view.buf, <size_t>view.len)

    def block_view(self, uint64_t offset, uint64_t n_bytes):
        """A block as a writable buffer."""
        self._check_not_forked()
        check_block(offset, n_bytes, 0, self.arena_offset, self.data_bytes, self.n_slots)
        return Memory(<size_t>(self.data + offset), <Py_ssize_t>n_bytes, self)

    def offset_of(self, view not None):
        """The offset in the data file of a memoryview of the arena, or None if it is none."""
        cdef char *address = <char *>PyMemoryView_GET_BUFFER(view).buf
        if self.data + self.arena_offset <= address < self.data + self.data_bytes:
            return <uint64_t>(address - self.data)
        return None

    def draft(self, uint64_t offset, Py_ssize_t n_bytes):
        """A draft in this block; the arguments and errors are those of `Draft`."""
        return Draft(self, offset, n_bytes)

    cdef void keep_window(self, char *address, size_t n_bytes, uint64_t offset) noexcept:
        """Keep a second mapping of a block for the next draft there, in the place of the oldest."""
        cdef Window *window = &self.windows[self.next_window]
        drop_window(window)
        window.address, window.n_bytes, window.offset = address, n_bytes, offset
        self.next_window = (self.next_window + 1) % MOST_WINDOWS

    cdef char *take_window(self, uint64_t offset, size_t n_bytes) noexcept:
        """A kept mapping of this block, as large, or NULL if there is none."""
        cdef char *taken
        cdef int index
        for index in range(MOST_WINDOWS):
            if self.windows[index].offset == offset and self.windows[index].n_bytes == n_bytes:
                taken = self.windows[index].address
                memset(&self.windows[index], 0, sizeof(Window))
                return taken
        return NULL

    def hold(self, int slot, uint64_t use, ranks):
        """Have `given_up_holds` look for these ranks to give up this use of the slot."""
        cdef int rank
        for rank in ranks:
            self._held_use(slot, rank)[0] = use
        self.n_slots_used = max(self.n_slots_used, slot + 1)

    def end_hold(self, int slot, int rank):
        """Look no more for this rank to give up the slot."""
        self._held_use(slot, rank)[0] = 0

    cdef inline uint64_t *_held_use(self, int slot, int rank) except NULL:
        self._check_not_forked()
        if not (0 <= slot < <int>self.n_slots and 0 <= rank < self.n_readers):
            raise ValueError(f"there is no slot {slot} of rank {rank}")
        return &self.held_uses[rank][slot]

    def given_up_holds(self):
        """The (slot, rank) of each hold that was given up, until `end_hold` is called for it."""
        cdef int rank, slot
        cdef uint64_t given_ups
        cdef uint64_t *words
        cdef uint64_t *uses
        cdef Py_ssize_t n_before
        self._check_not_forked()
        holds = []
        for rank in range(self.n_readers):
            # Acquire pairs with the release in give_up: the words are as new as the count.
            given_ups = load_acquire(self.given_ups_words[rank])
            if given_ups == self.seen_given_ups[rank]:
                continue
            n_before = len(holds)
            words, uses = self.given_up_words[rank], self.held_uses[rank]
            for slot in range(self.n_slots_used):
                # Acquire pairs with the release in give_up: the reader's last loads from the block
                # came before it. Any other number is an earlier use's, or damage.
                if uses[slot] and load_acquire(&words[slot]) == uses[slot]:
                    holds.append((slot, rank))
            if len(holds) == n_before:
                self.seen_given_ups[rank] = given_ups
        return holds

    def expected_ranks(self):
        """The ranks that a message published now is for."""
        return [rank for rank in range(self.n_readers) if self.is_expected[rank]]

    def publish_file(self, uint64_t nonce, list stream not None, list buffers not None):
        """Publish a message whose image lies in a memory file. The chunk has been claimed."""
        cdef ImageHeader *header = <ImageHeader *>self.chunk(self.published)
        self._check_not_forked()
        header.sequence = self.published
        header.kind = KIND_FILE
        header.stream_bytes = nonce
        header.n_buffers = header.slot = 0
        self._count(stream, buffers)
        self._publish()

    def published_parts(self, uint64_t number):
        """
        The stream and the buffers of a published message, as read-only views of where they lie.

        Somebody must hold the message's place in the ring for as long as they are used.
        """
        cdef const char *chunk = self.chunk(number)
        cdef uint64_t start, limit_bytes = self.chunk_bytes
        cdef ImageHeader header
        self._check_not_forked()
        memcpy(&header, chunk, sizeof(ImageHeader))
        start = <uint64_t>(chunk - self.data)
        if header.kind == KIND_BLOCK:
            start, limit_bytes = header.stream_bytes, header.n_buffers
        whole = memoryview(<object>self.data_view.obj).toreadonly()
        parts = []
        for offset, length, slot in image_ranges(self.data + start, limit_bytes, number,
                                                 self.arena_offset, self.data_bytes, self.n_slots):
            if slot < 0:
                offset += start
            parts.append(whole[offset : offset + length])
        return parts[0], parts[1:]

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
        if self.n_slots:
            store_relaxed(self.guard_word, self.published)
        store_relaxed(self.writer_cpu, this_cpu())
        # Release pairs with the acquire load in RingReader: the chunk is written before it.
        store_release(self.published_word, self.published)
        self._wake_readers()

    def skip_to(self, uint64_t number):
        """
        Go on with this message number, as if those before it had been published.

        Raises ValueError if it is behind, or a reader is waited for.
        """
        self._check_not_forked()
        if self.n_expected or number < self.published:
            raise ValueError(f"{self.n_expected} readers wait for message {self.published}, "
                             f"not {number}")
        self.published = number
        store_release(self.published_word, number)

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

    def wait_for_space(self, int64_t spin_ns, int64_t sleep_ns, uint64_t n_free=1):
        """
        Wait until so many chunks are free: poll first, then sleep once, with the GIL released.

        Returns early for a wake-up, a signal (whose handler has run), `stop` or `nudge`; whether it
        was nudged.
        """
        cdef int64_t start_ns = monotonic_ns()
        cdef bint is_nudged
        self._check_not_forked()
        with nogil:
            if not self._poll_space(start_ns + spin_ns, n_free) and sleep_ns > 0:
                self._sleep_for_space(sleep_ns, n_free)
            is_nudged = load_acquire(&self.is_nudged)
            store_relaxed(&self.is_nudged, 0)  # what it was for is looked at after this
            fence_full()
        self._count_wait(start_ns)
        PyErr_CheckSignals()
        return is_nudged

    cdef bint _poll_space(self, int64_t until_ns, uint64_t n_free) noexcept nogil:
        cdef int _round
        while monotonic_ns() < until_ns and not self._is_told() and not self._is_on_their_cpu():
            for _round in range(POLLS_PER_CLOCK):
                if self._has_space(n_free):
                    return True
                pause_polling()
        return self._has_space(n_free)

    cdef bint _is_on_their_cpu(self) noexcept nogil:
        """Whether a rank that is furthest behind needs this CPU, which polling would keep."""
        cdef uint64_t here = this_cpu()
        cdef int rank
        for rank in range(self.n_readers):
            if (self.is_expected[rank] and self.cached_cursors[rank] == self.cached_least
                    and load_relaxed(self.cpus[rank]) == here):
                return True
        return False

    cdef void _sleep_for_space(self, int64_t sleep_ns, uint64_t n_free) noexcept nogil:
        cdef uint32_t seen
        store_relaxed(self.writer_sleeps, 1)
        # This fence and the one in RingReader._give_back: either the reader sees the mark, or we
        # see its cursor.
        fence_full()
        seen = word_load_acquire(self.writer_word)
        if not self._has_space(n_free) and not self._is_told():
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
        """
        Never wait for the rank's present attachment again; its epoch ends with it.

        Returns the last use that it may have leased.
        """
        self.new_epoch(rank)
        # The epoch is stored before any chunk that this reader has not released is written again:
        # pairs with the acquire fence in RingReader.try_take. And before the load of what it has
        # leased: pairs with the fence in RingReader._parts.
        fence_full()
        self.cursors[rank] = NULL
        store_relaxed(self.sleeps[rank], 0)  # a reader that was killed asleep left its mark
        if self.is_expected[rank]:
            self.is_expected[rank] = False
            self.n_expected -= 1
        if self.damaged_rank == rank:
            self.damaged_rank = -1
        self._refresh()
        word_bump(self.readers_word)
        wake_all(self.readers_word)  # it may be alive and asleep
        return load_acquire(self.rank_word(rank, self.layout.leased_in_rank))

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
            self._mark(&self.is_stopped, self.writer_word)

    def nudge(self):
        """End the present wait or else the next one, from any thread."""
        self._check_not_forked()
        with nogil:
            self._mark(&self.is_nudged, self.writer_word)

    def say_failed(self, str text not None):
        """
        Leave a text to the readers that find this end closed or dead; the first one stays.

        Raises ValueError if it is empty or too long.
        """
        cdef bytes encoded = text.encode()
        cdef uint64_t length = <uint64_t>PyBytes_GET_SIZE(encoded)
        self._check_not_forked()
        if not 0 < length <= self.most_failure_bytes:
            raise ValueError(f"a failure of {length} bytes, not 1 to {self.most_failure_bytes}")
        if not load_relaxed(self.failure_word):
            memcpy(self.failure_word + 1, PyBytes_AS_STRING(encoded), length)
            # Release pairs with the acquire load in RingReader.failure: who sees the length sees
            # the text.
            store_release(self.failure_word, length)

    def say_closing(self):
        """Tell the readers that nothing follows. Nothing may be published afterwards."""
        self._check_not_forked()
        with nogil:
            # Release pairs with the acquire load in RingReader.is_closing: who sees the mark sees
            # the last published counter and the failure too.
            store_release(self.closing_word, 1)
            self._wake_readers()


cdef void drop_window(Window *window) noexcept:
    if window.address is not NULL:
        unmap(window.address, window.n_bytes)
    memset(window, 0, sizeof(Window))


def address_of(view not None):
    """Where a memoryview begins."""
    return <size_t>PyMemoryView_GET_BUFFER(view).buf


@cython.final
@cython.no_gc
cdef class Draft:
    """
    A block that the writer fills before it is published, as a writable buffer.

    It is a second mapping of the block, at an address that stays its own: shared until `detach`,
    private from then on.

    Args:
        ring: the writer's.
        offset: of the block in the data file.
        n_bytes: the size of the buffer, up to that of the block.

    Raises:
        OSError: the kernel refused the mapping.
    """

    cdef object __weakref__
    cdef Link link                           # in the list of all
    cdef RingWriter ring
    cdef char *memory
    cdef char *snapshot                      # what a forked child is to see
    cdef size_t mapped_bytes
    cdef Py_ssize_t n_bytes
    cdef readonly uint64_t offset            # of the block in the data file
    cdef readonly int is_detached
    cdef bint is_private                     # every page of it, since a fork
    cdef unsigned long fork_count_at_start

    def __cinit__(self, RingWriter ring not None, uint64_t offset, Py_ssize_t n_bytes):
        cdef char *source = ring.data + offset
        ring._check_not_forked()
        check_block(offset, <uint64_t>n_bytes, 0, ring.arena_offset, ring.data_bytes, ring.n_slots)
        self.fork_count_at_start = fork_count
        self.offset, self.n_bytes = offset, n_bytes
        self.mapped_bytes = whole_pages(<size_t>n_bytes)
        self.memory = ring.take_window(offset, self.mapped_bytes)
        if self.memory is NULL:
            with nogil:
                self.memory = <char *>map_again(source, self.mapped_bytes)
        if self.memory is NULL:
            PyErr_SetFromErrno(OSError)
        self.ring = ring
        link_in(&newest_draft, &self.link, <void *>self)

    def __dealloc__(self):
        if self.ring is None:
            return
        link_out(&newest_draft, &self.link)
        if self.is_detached:
            with nogil:
                unmap(self.memory, self.mapped_bytes)
        elif self.fork_count_at_start == fork_count:
            self.ring.keep_window(self.memory, self.mapped_bytes, self.offset)
        self.ring.ended_drafts += 1

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.n_bytes, False, flags)

    @property
    def address(self):
        """Where it begins."""
        return <size_t>self.memory

    cdef int detach(self, int data_descriptor) noexcept:
        """
        Show what is written from now on to nobody else; the bytes stay.

        Returns an errno, and then the memory can't be used any more.
        """
        cdef int failure
        cdef void *moved
        with nogil:
            failure = map_privately(self.memory, self.mapped_bytes, data_descriptor, self.offset,
                                    &moved, &self.is_detached)
        if moved is not NULL:
            self.ring.keep_window(<char *>moved, self.mapped_bytes, self.offset)
        return failure

    cdef void before_fork(self) noexcept:
        """Prepare what a forked child is to see. Without memory for it, it sees nothing."""
        if self.is_detached:
            if not self.is_private:  # a page stays private: the next children share it
                make_private(self.memory, self.mapped_bytes)
                self.is_private = True
            return
        if self.fork_count_at_start != fork_count:
            return  # this child sees nothing itself
        self.snapshot = <char *>copy_of(self.memory, self.mapped_bytes)
        if self.snapshot is not NULL:
            # So that the child has nothing else at this address.
            set_inherited(self.memory, self.mapped_bytes, True)

    cdef void after_fork(self, bint in_child) noexcept:
        """In the child: end what it shares with its parent. In the parent: clear up."""
        if self.snapshot is NULL:
            return
        if not in_child:
            set_inherited(self.memory, self.mapped_bytes, False)
            unmap(self.snapshot, self.mapped_bytes)
        else:
            move_to(self.snapshot, self.memory, self.mapped_bytes)
            self.is_detached = self.is_private = True
        self.snapshot = NULL


cdef void give_up(uint64_t *given_up, uint64_t *given_ups, uint64_t slot,
                  uint64_t use) noexcept nogil:
    """Say that this rank does not read the slot's block any more."""
    # Release pairs with the acquire load in RingWriter.given_up_holds. A struck attachment may be
    # late: then the slot may have had a newer use.
    raise_to(&given_up[slot], use)
    # An atomic addition: an attachment that was struck may still give blocks up.
    count_up(given_ups)


@cython.final
@cython.no_gc
cdef class Lease:
    """
    A reader's right to a block, as a writable buffer that nobody else sees written.

    It ends with the object, not with the buffer: torch lets go of the buffer at once and keeps the
    object.
    """

    cdef Leases leases
    cdef Link link                           # in the list of `Leases`
    cdef char *address
    cdef size_t n_bytes
    cdef uint64_t slot, use
    cdef bint is_inherited                   # and every page of it private

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.address, <Py_ssize_t>self.n_bytes, False, flags)

    def __dealloc__(self):
        if self.leases is not None:
            self.leases.end(self)


@cython.final
@cython.no_gc
cdef class Leases:
    """
    The leases of one reader, and the private mapping of the arena that they are parts of.

    A page that is written to becomes the reader's own; it is dropped before its block is given up,
    or the block's next use would show old bytes there. The kernel keeps what a lease shows for as
    long as it lives: after the reader was closed, and after the writer's death.
    """

    cdef Link link                           # in the list of all
    cdef char *address                       # of the guard page; the arena follows
    cdef size_t n_bytes
    cdef uint64_t first_offset               # of the guard page in the data file
    cdef Link *newest                        # of the leases that live
    cdef object pins                         # the mappings that the words below lie in
    cdef uint64_t *given_up
    cdef uint64_t *given_ups
    cdef uint64_t released                   # how many messages will not be taken again
    cdef bint is_broken                      # pages could not be dropped
    cdef unsigned long fork_count_at_start

    def __cinit__(self, RingReader reader not None, int data_descriptor):
        self.fork_count_at_start = fork_count
        self.first_offset = reader.layout.guard_offset
        self.n_bytes = reader.data_bytes - self.first_offset
        self.pins = <object>reader.data_view.obj, <object>reader.control_view.obj
        self.given_up, self.given_ups = reader.given_up, reader.given_ups
        self.address = <char *>map_arena(data_descriptor, self.first_offset, self.n_bytes)
        if self.address is NULL:
            PyErr_SetFromErrno(OSError)
        link_in(&newest_leases, &self.link, <void *>self)

    def __dealloc__(self):
        if self.address is NULL:
            return
        link_out(&newest_leases, &self.link)
        # A forked child has the leased parts alone, and the rest may be somebody else's by now.
        if self.fork_count_at_start == fork_count:
            unmap(self.address, self.n_bytes)

    cdef bint passes_self_test(self) noexcept:
        """Whether the shared bytes are back after a private page was dropped."""
        cdef char *sample = self.address + BUFFER_ALIGNMENT
        cdef char shared = sample[0]
        sample[0] = shared + 1
        return drop_private_pages(self.address, BUFFER_ALIGNMENT) and sample[0] == shared

    cdef bint is_good(self, uint64_t use) noexcept:
        """
        Whether blocks of this use show what the writer wrote.

        `mlockall` makes every page private at once. The guard page then keeps the number of a
        message before that; the writer stores it before it publishes.
        """
        return not self.is_broken and load_relaxed(<uint64_t *>self.address) >= use

    cdef Lease lease(self, uint64_t offset, uint64_t length, uint64_t slot, uint64_t use):
        cdef Lease lease = Lease.__new__(Lease)
        lease.address = self.address + (offset - self.first_offset)
        lease.n_bytes, lease.slot, lease.use = length, slot, use
        link_in(&self.newest, &lease.link, <void *>lease)
        lease.leases = self
        return lease

    cdef void end(self, Lease lease) noexcept:
        """The last reference to a lease has gone; called by its destructor."""
        cdef bint is_dropped
        link_out(&self.newest, &lease.link)
        if self.fork_count_at_start != fork_count:
            if lease.is_inherited:
                unmap(lease.address, whole_pages(lease.n_bytes))
            return
        if lease.is_inherited:  # with the GIL, or a child forked meanwhile would have it for ever
            set_inherited(lease.address, lease.n_bytes, False)
        with nogil:
            is_dropped = drop_private_pages(lease.address, lease.n_bytes)
        if not is_dropped:
            self.is_broken = True  # and the block is never given up: its next use would be torn
        elif lease.use <= self.released:
            # A message that was not released may be taken again: its blocks stay.
            give_up(self.given_up, self.given_ups, lease.slot, lease.use)

    cdef void keep(self) noexcept:
        """Make every page of every lease private, for forked children."""
        cdef Link *link = self.newest
        cdef Lease lease
        while link is not NULL:
            lease = <Lease>link.owner
            if not lease.is_inherited:  # a page stays private: the next children share it
                # Not without the GIL: a lease that is taken or ends meanwhile would be missed.
                make_private(lease.address, lease.n_bytes)
                set_inherited(lease.address, lease.n_bytes, True)
                lease.is_inherited = True
            link = link.next


@cython.final
cdef class RingReader(_End):
    """One reader's side of a ring. One thread at a time, but for `stop` and the counters."""

    cdef uint64_t cursor
    cdef uint64_t epoch
    cdef uint64_t *own_epoch_word
    cdef uint64_t *cursor_word
    cdef uint64_t *sleeps_word
    cdef uint64_t *left_word
    cdef uint64_t *leased_word
    cdef uint64_t *cpu_word
    cdef uint64_t taken_bytes, taken_oob_buffers, taken_oob_bytes   # of the message not released
    cdef object taken                        # what was taken of it, if that holds leases
    cdef uint64_t *given_up                  # a word for each slot
    cdef uint64_t *given_ups
    cdef list copied_slots                   # of the blocks that were copied out of this message
    cdef Leases leases                       # None: blocks are copied
    cdef readonly uint64_t messages, bytes, oob_buffers, oob_bytes

    def __cinit__(self, segment, int rank, uint64_t epoch):
        self.epoch = epoch
        self.given_up = <uint64_t *>(
            self.control + <size_t>self.layout.rank_given_up_offset(rank))
        self.given_ups = self.rank_word(rank, self.layout.given_ups_in_rank)
        self.own_epoch_word = self.epoch_word(rank)
        self.cursor_word = self.rank_word(rank, self.layout.cursor_in_rank)
        self.sleeps_word = self.rank_word(rank, self.layout.sleeps_in_rank)
        self.left_word = self.rank_word(rank, self.layout.left_in_rank)
        self.leased_word = self.rank_word(rank, self.layout.leased_in_rank)
        self.cpu_word = self.rank_word(rank, self.layout.cpu_in_rank)

    def begin(self, uint64_t start):
        """Begin with message number `start`, which the writer has told."""
        self.cursor = start

    def lease_from(self, int data_descriptor):
        """
        Lease blocks from now on instead of copying them, through a private mapping of the arena.

        Returns False if this kernel does not bring the shared bytes back after private ones were
        dropped. Raises OSError if it refuses the mapping.
        """
        leases = Leases(self, data_descriptor)
        if not leases.passes_self_test():
            return False
        leases.released = self.cursor
        self.leases = leases
        return True

    cdef inline uint64_t _available(self) noexcept nogil:
        # Acquire pairs with the release store in RingWriter._publish.
        return load_acquire(self.published_word) - self.cursor

    def try_take(self):
        """
        The next message, or None if there is none or this attachment is over.

        Returns one of these, and `release` gives the chunk back:

        * the stream, if it has no buffers;
        * (stream, list of buffers), all of it the caller's own: copies, or leases of blocks;
        * the nonce of the memory file that the message lies in, an int.

        A message that is taken and not released is taken again.

        Raises ProtocolError if the chunk is damaged.
        """
        cdef uint64_t available
        cdef ImageHeader header
        cdef const char *chunk
        self._check_not_forked()
        if load_relaxed(&self.is_stopped):
            return None
        if self._is_struck():
            self._end_taken()
            return None
        available = self._available()
        if available == 0:
            return None
        if available > self.n_chunks:
            return self._damaged(f"number {self.cursor} is overwritten")
        chunk = self.chunk(self.cursor)
        memcpy(&header, chunk, sizeof(ImageHeader))
        if header.sequence != self.cursor:
            return self._damaged(f"number {header.sequence} instead of {self.cursor}")
        if self.taken is not None:
            # A second set of leases would give the blocks up while the first is in use.
            return self._unless_struck(self.taken)
        self.taken_bytes = self.taken_oob_buffers = self.taken_oob_bytes = 0
        if header.kind == KIND_FILE:
            taken = header.stream_bytes
        elif header.kind == KIND_HERE and header.n_buffers == 0 and (
                header.stream_bytes <= self.chunk_bytes - sizeof(ImageHeader)):
            self.taken_bytes = header.stream_bytes
            taken = self._stream(chunk + sizeof(ImageHeader), header.stream_bytes)
        else:
            taken = self._parts(chunk, header)
        # Everything that was loaded from the chunk comes before this load of the epoch; pairs with
        # the fence in RingWriter.strike. Without it what was taken may be torn, since the writer
        # does not wait for this reader.
        fence_acquire()
        return self._unless_struck(taken)

    cdef object _unless_struck(self, taken):
        if not self._is_struck():
            return taken
        self._end_taken()
        return None

    cdef void _end_taken(self) noexcept:
        """The message at the cursor is not taken again: its leases end like those before it."""
        if self.leases is not None:
            self.leases.released = self.cursor + 1
        self.taken = None

    cdef inline bint _is_struck(self) noexcept nogil:
        return load_acquire(self.own_epoch_word) != self.epoch

    cdef object _damaged(self, str what):
        """Raise ProtocolError, unless the chunk may be torn since nobody waits for this reader."""
        if self._is_struck():
            return None
        raise damaged(what)

    cdef object _parts(self, const char *chunk, ImageHeader header):
        """The stream and the buffers of an image, which lies in the chunk or in a block."""
        cdef uint64_t offset, length, limit_bytes = self.chunk_bytes
        cdef const char *image = chunk
        cdef bint is_in_block = header.kind == KIND_BLOCK
        try:
            if is_in_block:
                limit_bytes = header.n_buffers
                check_block(header.stream_bytes, limit_bytes, header.slot, self.arena_offset,
                            self.data_bytes, self.n_slots)
                image = self.data + header.stream_bytes
            ranges = image_ranges(image, limit_bytes, self.cursor, self.arena_offset,
                                  self.data_bytes, self.n_slots)
        except ProtocolError:
            if self._is_struck():
                return None
            raise
        spans = block_spans(ranges)
        if spans is None or (is_in_block and header.slot in spans):
            return self._damaged("two buffers with one slot")
        is_leased = self._can_lease()
        if is_leased:
            raise_to(self.leased_word, self.cursor + 1)
            # This fence and the one in RingWriter.strike: either the writer sees this word, or this
            # reader's next look at the epoch shows that it was struck.
            fence_full()
        self.copied_slots = [] if is_leased else list(spans)
        offset, length, _ = ranges[0]
        self.taken_bytes = length
        if is_in_block and is_leased:
            # The lease is the whole block's, which may hold small buffers too; those are copied.
            lease = self._lease(header.stream_bytes, limit_bytes, header.slot)
            stream = lease[offset : offset + length]
        else:
            stream = self._stream(image + offset, length)
            if is_in_block:
                self.copied_slots.append(header.slot)
        if is_leased:
            for slot, (start, end) in spans.items():
                spans[slot] = start, self._lease(start, end - start, slot)
        buffers = []
        for offset, length, slot in ranges[1:]:
            if slot < 0:
                buffers.append(self._copied(image + offset, length))
            elif is_leased:
                start, lease = spans[slot]
                buffers.append(lease[offset - <uint64_t>start : offset - <uint64_t>start + length])
            else:
                buffers.append(self._copied(self.data + offset, length))
            self.count_buffer(length)
        taken = stream, buffers
        if is_leased:
            self.taken = taken
        return taken

    cdef object _lease(self, uint64_t offset, uint64_t length, uint64_t slot):
        return memoryview(self.leases.lease(offset, length, slot, self.cursor + 1))

    cdef bint _can_lease(self) except -1:
        """Whether blocks can be leased; after `mlockall` the private mapping shows old bytes."""
        return self.leases is not None and self.leases.is_good(self.cursor + 1)

    cdef bytes _stream(self, const char *address, uint64_t length):
        # A copy, not a view: loading runs code, which may fork, and the child has no chunk.
        stream = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
        copy(PyBytes_AS_STRING(stream), address, <size_t>length)
        return stream

    cdef object _copied(self, const char *address, uint64_t length):
        # The writer reuses the memory, so what the caller keeps must be its own.
        copied = PyByteArray_FromStringAndSize(NULL, <Py_ssize_t>length)
        copy(PyByteArray_AS_STRING(copied), address, <size_t>length)
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
            self._end_taken()
            return False
        self.cursor += 1
        self.messages += 1
        self.bytes += self.taken_bytes
        self.oob_buffers += self.taken_oob_buffers
        self.oob_bytes += self.taken_oob_bytes
        if self.leases is not None:
            self.leases.released = self.cursor
        self.taken = None
        if self.copied_slots:
            for slot in self.copied_slots:
                give_up(self.given_up, self.given_ups, slot, self.cursor)
            self.copied_slots = None
        self._give_back()
        return True

    cdef inline void _give_back(self) noexcept nogil:
        store_relaxed(self.cpu_word, this_cpu())
        # Release pairs with the acquire load in RingWriter._refresh.
        store_release(self.cursor_word, self.cursor)
        # This fence and the one in RingWriter._sleep_for_space.
        fence_full()
        if load_relaxed(self.writer_sleeps):
            self._wake_writer()

    def pass_over(self):
        """
        Give the next chunk and its blocks back unread; who calls has them sent elsewhere.

        Returns False if this attachment was struck.
        """
        cdef const char *chunk = self.chunk(self.cursor)
        cdef const char *image = chunk
        cdef uint64_t limit_bytes = self.chunk_bytes
        cdef ImageHeader header
        self._check_not_forked()
        if self._is_struck():
            return False
        memcpy(&header, chunk, sizeof(ImageHeader))
        self.copied_slots = []
        if header.kind == KIND_BLOCK:
            self.copied_slots.append(header.slot)
            image, limit_bytes = self.data + header.stream_bytes, header.n_buffers
        if header.kind != KIND_FILE:
            ranges = image_ranges(image, limit_bytes, self.cursor, self.arena_offset,
                                  self.data_bytes, self.n_slots)
            self.copied_slots += {slot for _, _, slot in ranges if slot >= 0}
        return self.release()

    cdef void _wake_writer(self) noexcept nogil:
        word_bump(self.writer_word)
        wake_all(self.writer_word)

    def wait(self, int64_t spin_ns, int64_t sleep_ns):
        """
        Wait for a message: poll first, then sleep once, with the GIL released.

        Returns early for a wake-up, a signal (whose handler has run), `stop`, `nudge` or a closing
        writer; whether it was nudged.
        """
        cdef int64_t start_ns = monotonic_ns()
        cdef bint is_nudged
        self._check_not_forked()
        with nogil:
            if not self._poll(start_ns + spin_ns) and sleep_ns > 0:
                self._sleep(sleep_ns)
            is_nudged = load_acquire(&self.is_nudged)
            store_relaxed(&self.is_nudged, 0)  # what it was for is looked at after this
            fence_full()
        self._count_wait(start_ns)
        PyErr_CheckSignals()
        return is_nudged

    cdef bint _poll(self, int64_t until_ns) noexcept nogil:
        cdef int _round
        # The writer needs this CPU if it published there last: polling would keep it waiting.
        while (monotonic_ns() < until_ns and not self._is_told()
               and load_relaxed(self.writer_cpu) != this_cpu()):
            for _round in range(POLLS_PER_CLOCK):
                if self._available():
                    return True
                pause_polling()
        return self._available() != 0

    cdef void _sleep(self, int64_t sleep_ns) noexcept nogil:
        cdef uint32_t seen
        if load_relaxed(self.cursor_word) != self.cursor and not self._is_struck():
            # An earlier attachment of this rank, which was struck though it lives, stored last.
            self._give_back()
        store_relaxed(self.sleeps_word, 1)
        # This fence and the one in RingWriter._wake_readers: either the writer sees the mark, or
        # we see its store.
        fence_full()
        seen = word_load_acquire(self.readers_word)
        if self._available() == 0 and not load_acquire(self.closing_word) and not self._is_told():
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

    @property
    def failure(self):
        """What the writer said of its failure, or None. Look after `is_closing` or its death."""
        self._check_not_forked()
        # Acquire pairs with the release store in RingWriter.say_failed.
        cdef uint64_t length = load_acquire(self.failure_word)
        if not length:
            return None
        length = min(length, self.most_failure_bytes)
        text = PyBytes_FromStringAndSize(<char *>(self.failure_word + 1), <Py_ssize_t>length)
        return text.decode(errors="replace")

    def stop(self):
        """End this end's waits, from any thread."""
        self._check_not_forked()
        with nogil:
            self._mark(&self.is_stopped, self.readers_word)

    def nudge(self):
        """End the present wait or else the next one, from any thread."""
        self._check_not_forked()
        with nogil:
            self._mark(&self.is_nudged, self.readers_word)

    def leave(self):
        """
        Tell the writer not to wait for this attachment any more. Nothing may follow.

        A lease that is alive lasts, and gives its block up when it ends.
        """
        self._check_not_forked()
        self._end_taken()
        # Release pairs with the acquire load in RingWriter.has_left. An attachment that was struck
        # may be late: then a newer one may have left.
        raise_to(self.left_word, self.epoch)
        with nogil:
            self._wake_writer()
