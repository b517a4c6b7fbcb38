// A rectangle of a packed micro-batch: some of its rows, and of those some of the tokens. Segments are cut where they
// cross its border. Call without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fill.h"
#include "record.h"
#include "routing.h"

namespace shmstage {

/// Ends are not in it.
struct Rectangle {
    std::uint64_t row_begin;
    std::uint64_t row_end;
    std::uint64_t token_begin;
    std::uint64_t token_end;
};

/// What of a segment lies in a rectangle: one token or more.
struct Cut {
    std::size_t segment;  ///< which, by its index
    Segment place;        ///< in the rectangle
    std::uint64_t first;  ///< its first token, counted in the whole segment
    std::int32_t number;  ///< of the whole segment: 1..n from left to right in its row
};

/// In order of place. The segments have passed segments_fault.
std::vector<Cut> cuts_of(const std::vector<Segment>& segments, const Rectangle& within);

std::uint64_t tokens_of(const std::vector<Cut>& cuts);

/// Positions are those of the rectangle, `tokens` to a row.
std::vector<Span> padded_spans(const std::vector<Cut>& cuts, std::uint64_t tokens);

/// Positions are the real tokens in the rectangle, one cut after another.
std::vector<Span> compact_spans(const std::vector<Cut>& cuts);

/// Whether each cut's record is there and has its tokens. `records`: one per segment, null where there is none.
bool covered(const std::vector<Cut>& cuts, const std::vector<const Record*>& records);

/// Field `number` of each cut. The cuts are covered.
std::vector<Source> words_of(const std::vector<Cut>& cuts, const std::vector<const Record*>& records,
                             std::size_t number);

/// Routing of each cut. The cuts are covered.
std::vector<RoutingSource> routing_of(const std::vector<Cut>& cuts, const std::vector<const Record*>& records);

std::vector<Segment> places_of(const std::vector<Cut>& cuts);

}  // namespace shmstage
