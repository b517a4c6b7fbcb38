// Readers' cells: who reads the newest publication of a pool, so that its owner writes where nobody reads. No policy.
#pragma once

#include <cstdint>

#include "slots.h"

namespace shmstage {

/// Says which publication is the newest. `word` is never used twice while the pool lives; 0 = there is none.
void set_latest(const Slots& pool, std::uint64_t word);
std::uint64_t latest(const Slots& pool);

/// Takes a cell for the reader that `identity` (not 0) names; -1 if all are taken.
std::int32_t claim_cell(const Slots& pool, std::uint64_t identity);

/// Gives a cell back in the name of `identity`: by the reader itself, or by the pool's owner once it is proven dead.
/// False if the cell is somebody else's.
bool release_cell(const Slots& pool, std::uint32_t cell, std::uint64_t identity);

/// Writes the newest publication into a cell and returns it (0 = there is none). From here until put_back the owner,
/// which looks at every cell after it has made another publication the newest, does not write where it lies.
std::uint64_t take_latest(const Slots& pool, std::uint32_t cell);

/// The reader is done with what it took.
void put_back(const Slots& pool, std::uint32_t cell);

struct Cell {
    std::uint64_t identity;  ///< whose it is; 0 = nobody's
    std::uint64_t word;      ///< what it reads; 0 = nothing
};

Cell cell(const Slots& pool, std::uint32_t index);

}  // namespace shmstage
