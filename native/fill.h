// Writing packed fields: spans of tokens copied to their place in a row, everything else padded. Call without
// the GIL. Only memcpy and memset touch the destination, so it may begin at any address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shmstage {

/// One trajectory's span in a row, in tokens.
struct Segment {
    std::uint64_t row;
    std::uint64_t start;
    std::uint64_t length;
};

/// What is wrong with a segment, or null if all are in rows of `tokens`, in order of (row, start), apart.
const char* segments_fault(const std::vector<Segment>& segments, std::uint64_t rows, std::uint64_t tokens);

/// Bytes of one segment of one field; borrowed.
struct Source {
    const std::byte* data;
    std::uint64_t tokens;  ///< at most the segment's length; the rest of the segment is padding
};

/// One packed field [rows, tokens] of `token_nbytes` bytes a token; borrowed.
struct SpanField {
    std::byte* destination;
    std::uint64_t token_nbytes;
    unsigned char pad;             ///< every byte of the padding: 0 is zero, 0xff is -1
    std::vector<Source> sources;   ///< one per segment
};

/// Writes every byte of the field. The segments have passed segments_fault.
void fill_spans(const SpanField& field, const std::vector<Segment>& segments, std::uint64_t rows,
                std::uint64_t tokens);

/// int32 [rows, tokens]: 1..n from left to right in each row, 0 elsewhere.
void fill_segment_ids(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows,
                      std::uint64_t tokens);

/// int32 [rows, tokens]: 0..length-1 in each segment, 0 elsewhere.
void fill_segment_positions(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows,
                            std::uint64_t tokens);

/// `count` choices of `top_k` int16 expert ids. A choice is all -1 (unset) or distinct ids in [0, experts).
/// Returns the first choice that is neither, or -1.
std::int64_t routing_fault(const std::byte* routing, std::uint64_t count, std::uint64_t top_k,
                           std::int32_t experts);

}  // namespace shmstage
