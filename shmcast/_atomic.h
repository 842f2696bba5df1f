/* Every memory order of the project. The rest of the code uses these names only.
 *
 * Cython has no <stdatomic.h>, and a plain load through a pointer is hoisted out of a polling loop,
 * so these are compiler builtins: free on x86-64, and ldar, stlr and dmb on aarch64.
 */
#ifndef SHMCAST_ATOMIC_H
#define SHMCAST_ATOMIC_H

#include <stdint.h>

_Static_assert(sizeof(void *) == 8, "shmcast needs 64-bit addresses");
_Static_assert(__atomic_always_lock_free(sizeof(uint64_t), 0), "64-bit atomics must not lock");
_Static_assert(__atomic_always_lock_free(sizeof(uint32_t), 0), "32-bit atomics must not lock");

/* Pairs with store_release: what was stored before that one is seen after this one. */
static inline uint64_t load_acquire(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Pairs with load_acquire. */
static inline void store_release(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t load_relaxed(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void store_relaxed(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* Stores the value, unless the word is larger already, also where several processes do so; pairs with
 * load_acquire. */
static inline void raise_to(uint64_t *word, uint64_t value) {
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (seen < value
           && !__atomic_compare_exchange_n(word, &seen, value, 1, __ATOMIC_RELEASE,
                                           __ATOMIC_RELAXED))
        ;
}

/* Adds 1, also where several processes do so; pairs with load_acquire. */
static inline void count_up(uint64_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
}

/* Between a store and a load of different words on both sides: at least one side sees the other. */
static inline void fence_full(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Keeps the loads before it before the loads after it. */
static inline void fence_acquire(void) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

/* A word to sleep on: 32 bits, as the kernel has it. */
static inline uint32_t word_load_acquire(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void word_bump(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
}

/* Tells the processor that this is a polling loop. */
static inline void pause_polling(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
#error "shmcast supports x86-64 and aarch64"
#endif
}

#endif
