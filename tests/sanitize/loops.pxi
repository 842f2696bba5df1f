

# Added to `_ring.pyx` in a copy of the package: the two ends pass messages without ever taking the
# GIL, whose mutex would order everything for the thread sanitizer. What is between the waits,
# stores and loads of the core itself is a copy of what the methods with Python objects do.

from libc.string cimport memcmp

cdef extern from "<sched.h>" nogil:
    int sched_yield() noexcept

cdef enum:
    BODY_BYTES = 96
    N_BLOCKS = 12         # fewer than chunks, so that these are waited for too
    N_IN_TURN = 100       # with blocks, then without: given-up words must not stand in for cursors


cdef bint _has_block(uint64_t number) noexcept nogil:
    return number // N_IN_TURN % 2 == 0


cdef bint _is_given_up(RingWriter ring, uint64_t slot, uint64_t use) noexcept nogil:
    cdef int rank
    for rank in range(ring.n_readers):
        if load_acquire(&ring.given_up_words[rank][slot]) < use:
            return False
    return True


def write_numbers(RingWriter ring not None, uint64_t count, int64_t spin_ns, int64_t sleep_ns):
    """Publish so many messages, each with a body in its chunk and some with one in a block."""
    cdef uint64_t uses[N_BLOCKS]
    cdef ImageHeader *header
    cdef uint64_t slot
    memset(uses, 0, sizeof(uses))
    with nogil:
        while ring.published < count:
            if not ring._has_space(1):
                if not ring._poll_space(monotonic_ns() + spin_ns, 1):
                    ring._sleep_for_space(sleep_ns, 1)
                continue
            if _has_block(ring.published):
                slot = ring.published % N_BLOCKS
                while not _is_given_up(ring, slot, uses[slot]):
                    sched_yield()
                uses[slot] = ring.published + 1
                memset(ring.data + ring.arena_offset + slot * PAGE_BYTES,
                       <int>ring.published & 255, BODY_BYTES)
            header = <ImageHeader *>ring.chunk(ring.published)
            header.sequence = ring.published
            memset(header + 1, <int>ring.published & 255, BODY_BYTES)
            ring._publish()


def read_numbers(RingReader ring not None, uint64_t count, int64_t spin_ns, int64_t sleep_ns):
    """Take so many messages; how many were wrong."""
    cdef char body[BODY_BYTES]
    cdef char expected[BODY_BYTES]
    cdef ImageHeader *header
    cdef uint64_t n_wrong = 0, slot
    with nogil:
        while ring.cursor < count:
            if ring._available() == 0:
                if not ring._poll(monotonic_ns() + spin_ns):
                    ring._sleep(sleep_ns)
                continue
            slot = ring.cursor % N_BLOCKS
            header = <ImageHeader *>ring.chunk(ring.cursor)
            memcpy(body, header + 1, BODY_BYTES)
            memset(expected, <int>ring.cursor & 255, BODY_BYTES)
            n_wrong += header.sequence != ring.cursor or memcmp(body, expected, BODY_BYTES) != 0
            ring.cursor += 1
            ring._give_back()
            if _has_block(ring.cursor - 1):
                # A lease outlives its chunk.
                memcpy(body, ring.data + ring.arena_offset + slot * PAGE_BYTES, BODY_BYTES)
                n_wrong += memcmp(body, expected, BODY_BYTES) != 0
                give_up(ring.given_up, ring.given_ups, slot, ring.cursor)
    return n_wrong
