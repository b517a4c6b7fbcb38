// Atomic access to plain words in shared memory: what std::atomic_ref will be once C++20 can be asked for.
#pragma once

#include <cstdint>

namespace shmstage {

template <typename Word>
inline Word load_acquire(const Word& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename Word>
inline Word load_relaxed(const Word& word) {
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

template <typename Word>
inline void store_release(Word& word, Word value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

template <typename Word>
inline void store_relaxed(Word& word, Word value) {
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

/// Sequentially consistent: the wake-up protocol needs "my store, then your load" in one total order.
template <typename Word>
inline Word load_ordered(const Word& word) {
    return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}

template <typename Word>
inline void store_ordered(Word& word, Word value) {
    __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

template <typename Word>
inline Word add_ordered(Word& word, Word value) {
    return __atomic_fetch_add(&word, value, __ATOMIC_SEQ_CST);
}

template <typename Word>
inline bool exchange_if_equal(Word& word, Word expected, Word value) {
    return __atomic_compare_exchange_n(&word, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// The thread sanitizer does not model fences and warns of each; they only matter to readers that look at a slot
// which was taken from them, and those check the generation again.
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"
#endif
/// Nothing after it becomes visible before anything that precedes it, and the other way round.
inline void fence_ordered() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/// Reads before it are over before reads after it begin.
inline void fence_acquire() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
#pragma GCC diagnostic pop

static_assert(__atomic_always_lock_free(sizeof(std::uint64_t), nullptr), "slots need lock-free 64-bit words");

}  // namespace shmstage
