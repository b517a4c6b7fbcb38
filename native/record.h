// One trajectory's arrays as a fill reads them: noted once, when the trajectory arrives, so that no fill asks Python for
// them again. Borrowed pointers; who made the record keeps the arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fill.h"
#include "routing.h"

namespace shmstage {

constexpr std::size_t kWordNbytes = 4;  ///< of every field but routing, per token
constexpr std::size_t kMostFields = 8;

struct Record {
    std::uint64_t begin = 0;  ///< first token that is here; others than 0 where a trajectory was cut
    std::uint64_t tokens = 0;
    std::uint64_t loss_tokens = 0;
    std::uint32_t present = 0;  ///< bit i: field i is there
    std::uint32_t experts = 0;  ///< that routing chose from; 0: not known
    std::array<const std::byte*, kMostFields> words{};  ///< `tokens` words each
    RoutingShape shape{0, 0, 0};                        ///< layers 0: no routing; bits: of held ids, 0 where dense
    RoutingSource routing{nullptr, 0, false};
};

/// Whether both can be in one micro-batch. How routing is held does not matter.
bool same_kind(const Record& a, const Record& b);

/// What the records of a micro-batch come to.
struct Totals {
    std::uint64_t tokens;
    std::uint64_t loss_tokens;
    std::uint64_t trained;  ///< records with a loss token
};

Totals totals_of(const std::vector<const Record*>& records);

/// Field `number` of each record.
std::vector<Source> words_of(const std::vector<const Record*>& records, std::size_t number);

/// Routing of each record.
std::vector<RoutingSource> routing_of(const std::vector<const Record*>& records);

}  // namespace shmstage
