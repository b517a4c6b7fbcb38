// Takes the place of native/atomics.h when native/slots.cpp and native/cells.cpp are compiled to be stepped: every
// access to shared memory first hands control back to the test, which decides who goes on.
#pragma once

#include <cstdint>

namespace shmstage {

enum class Access : std::uint64_t { kLoad = 1, kStore, kSwap, kAdd, kFutexWait, kFutexWake, kAsleep };

/// Returns when the test lets this access happen.
void await_turn(const void* word, Access access);

template <typename Word>
inline Word load_acquire(const Word& word) {
    await_turn(&word, Access::kLoad);
    return word;
}

template <typename Word>
inline Word load_relaxed(const Word& word) {
    return load_acquire(word);
}

template <typename Word>
inline Word load_ordered(const Word& word) {
    return load_acquire(word);
}

template <typename Word>
inline void store_release(Word& word, Word value) {
    await_turn(&word, Access::kStore);
    word = value;
}

template <typename Word>
inline void store_relaxed(Word& word, Word value) {
    store_release(word, value);
}

template <typename Word>
inline void store_ordered(Word& word, Word value) {
    store_release(word, value);
}

template <typename Word>
inline Word add_ordered(Word& word, Word value) {
    await_turn(&word, Access::kAdd);
    const Word before = word;
    word = static_cast<Word>(before + value);
    return before;
}

template <typename Word>
inline bool exchange_if_equal(Word& word, Word expected, Word value) {
    await_turn(&word, Access::kSwap);
    if (word != expected) return false;
    word = value;
    return true;
}

inline void fence_ordered() {}
inline void fence_acquire() {}

}  // namespace shmstage
