# cython: language_level=3

from libc.stdint cimport uint32_t, uint64_t


cdef extern from "_atomic.h" nogil:
    uint64_t load_acquire(const uint64_t *word) noexcept
    void store_release(uint64_t *word, uint64_t value) noexcept
    uint64_t load_relaxed(const uint64_t *word) noexcept
    void store_relaxed(uint64_t *word, uint64_t value) noexcept
    void raise_to(uint64_t *word, uint64_t value) noexcept
    void count_up(uint64_t *word) noexcept
    void fence_full() noexcept
    void fence_acquire() noexcept
    uint32_t word_load_acquire(const uint32_t *word) noexcept
    void word_bump(uint32_t *word) noexcept
    void pause_polling() noexcept
