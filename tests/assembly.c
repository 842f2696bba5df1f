/* The orders of _atomic.h, one by one and where they matter, to be read as assembly. */
#include "_atomic.h"

uint64_t do_load_acquire(const uint64_t *word) { return load_acquire(word); }
void do_store_release(uint64_t *word, uint64_t value) { store_release(word, value); }
void do_raise_to(uint64_t *word, uint64_t value) { raise_to(word, value); }
void do_count_up(uint64_t *word) { count_up(word); }
void do_fence_full(void) { fence_full(); }
void do_fence_acquire(void) { fence_acquire(); }
uint32_t do_word_load_acquire(const uint32_t *word) { return word_load_acquire(word); }
void do_word_bump(uint32_t *word) { word_bump(word); }

void do_publish(uint64_t *chunk, uint64_t *published, uint64_t number) {
    chunk[0] = number;
    store_release(published, 1);
    chunk[1] = number;
}

uint64_t do_take(const uint64_t *chunk, const uint64_t *published) {
    const uint64_t before = chunk[0];
    const uint64_t number = load_acquire(published);
    return before + number + chunk[0];
}

uint64_t do_sleep(uint64_t *mark, const uint64_t *counter) {
    store_relaxed(mark, 1);
    fence_full();
    return load_relaxed(counter);
}

uint64_t do_compare(const uint64_t *chunk, const uint64_t *epoch) {
    const uint64_t number = load_relaxed(chunk);
    fence_acquire();
    return number + load_relaxed(epoch);
}
