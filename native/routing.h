// Expert choices of tokens in their encodings, from trajectories into a slot. Call without the GIL.
//
// Dense: int16 [tokens, layers, top_k], -1 = unset. Packed: a group is 8 consecutive tokens; the 8 ids of one
// (layer, k) lie in `bits` bytes as one little-endian integer, token j in bits j*bits..(j+1)*bits-1, an unset one as 0;
// beside it one validity byte per group and layer, whose bit j says that token j has this layer set.
// Held: what a waiting trajectory keeps, its packed groups and then their validity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fill.h"

namespace shmstage {

constexpr unsigned kGroup = 8;
constexpr unsigned kMostBits = 15;  ///< ids are int16 and not negative

struct RoutingShape {
    std::uint64_t layers;
    std::uint64_t top_k;
    unsigned bits;  ///< 1 to kMostBits where anything is packed

    std::uint64_t ids() const { return layers * top_k; }
    std::uint64_t token_nbytes() const { return ids() * sizeof(std::int16_t); }
    std::uint64_t group_nbytes() const { return ids() * bits; }
};

/// Bytes of `tokens` tokens as they are held.
std::uint64_t held_nbytes(const RoutingShape& shape, std::uint64_t tokens);

/// Dense to held. An id that needs more than `bits` bits is cut off, its neighbours stay whole.
void pack_routing(std::byte* held, const std::byte* dense, std::uint64_t tokens, const RoutingShape& shape);

/// Held to dense.
void unpack_routing(std::byte* dense, const std::byte* held, std::uint64_t tokens, const RoutingShape& shape);

/// Routing of one segment, dense or held; borrowed. Tokens past `tokens` are unset. Held, it begins in a group's middle
/// where it was cut there: groups are kept whole.
struct RoutingSource {
    const std::byte* data;  ///< held: the group of the first token
    std::uint64_t tokens;
    bool held;
    const std::byte* validity = nullptr;  ///< held: that group's
    std::uint64_t skipped = 0;            ///< held: tokens of that group before the first, 0 to 7
};

/// What pack_routing made of `skipped` + `tokens` tokens, without the first `skipped` of them.
RoutingSource held_source(const std::byte* held, std::uint64_t skipped, std::uint64_t tokens, const RoutingShape& shape);

/// At most `count` tokens of a source, from `first` on.
RoutingSource part_of(const RoutingSource& source, std::uint64_t first, std::uint64_t count, const RoutingShape& shape);

/// Dense at the positions of `part`: of a padded field, or of a compact one (ragged). One source per span.
void fill_dense_routing(std::byte* destination, const RoutingShape& shape, const std::vector<RoutingSource>& sources,
                        const std::vector<Span>& spans, const Part& part);

/// The packed field.
struct PackedRouting {
    std::byte* ids;       ///< uint8 [groups, layers, top_k, bits]
    std::byte* validity;  ///< uint8 [groups, layers]
};

/// Packed, at compact positions. `part` counts groups.
void fill_packed_routing(const PackedRouting& field, const RoutingShape& shape,
                         const std::vector<RoutingSource>& sources, const std::vector<Span>& spans, const Part& part);

/// int32 [rows + 1]: how many real tokens lie in the rows before.
void fill_offsets(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows);

/// `count` choices of `top_k` int16 expert ids. A choice is all -1 (unset) or distinct ids in [0, experts).
/// Returns the first choice that is neither, or -1.
std::int64_t routing_fault(const std::byte* routing, std::uint64_t count, std::uint64_t top_k, std::int32_t experts);

}  // namespace shmstage
