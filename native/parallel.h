// Sharing the filling of fields between threads. Call without the GIL.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fill.h"

namespace shmstage {

/// Fields to be written, cut into parts that may be written in any order, by any thread.
class Work {
  public:
    /// A field of `positions`, `nbytes` each. `write` writes any part of it and throws nothing but bad_alloc.
    void add(std::uint64_t positions, std::uint64_t nbytes, std::function<void(const Part&)> write);

    /// Writes all of it. `threads` 0: as many as there are cores, if there is enough to write.
    void run(unsigned threads) const;

  private:
    struct Field {
        std::uint64_t positions;
        std::uint64_t nbytes;
        std::function<void(const Part&)> write;
    };
    std::vector<Field> fields_;
    std::uint64_t total_nbytes_ = 0;
};

}  // namespace shmstage
