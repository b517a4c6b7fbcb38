// What the sanitizer drivers share. They are programs of their own: they need a compiler and nothing else.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// Ends the program at once, with the place and the condition.
#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::fprintf(stderr, "CHECK failed: %s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                    \
        }                                                                                    \
    } while (false)

/// xorshift64: the same numbers in every run.
class Dice {
  public:
    explicit Dice(std::uint64_t seed) : state_(seed * 2654435769U + 1) {}
    std::uint64_t below(std::uint64_t limit) {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ % limit;
    }

  private:
    std::uint64_t state_;
};
