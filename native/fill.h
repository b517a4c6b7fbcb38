// Writing packed fields: spans of tokens copied to their place in a row, everything else padded. Call without
// the GIL. A field is an array of positions, `token_nbytes` each; any range of its positions can be written by itself,
// so that threads can share the work. The destination may begin at any address.
#pragma once

#include <algorithm>
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

/// A segment among the positions of a field.
struct Span {
    std::uint64_t begin;
    std::uint64_t length;
    std::int32_t number;      ///< 1..n from left to right in its row
    std::uint64_t first = 0;  ///< its first token, counted in the whole segment
};

/// Positions are those of [rows, tokens], row after row. The segments have passed segments_fault.
std::vector<Span> padded_spans(const std::vector<Segment>& segments, std::uint64_t tokens);

/// Positions are the real tokens, one segment after another.
std::vector<Span> compact_spans(const std::vector<Segment>& segments);

/// Positions to write: [first, last). `streaming`: past the cache.
struct Part {
    std::uint64_t first;
    std::uint64_t last;
    bool streaming;
};

/// Bytes of one segment of one field; borrowed.
struct Source {
    const std::byte* data;
    std::uint64_t tokens;  ///< at most the segment's length; the rest of the segment is padding
};

/// One packed field of `token_nbytes` bytes a position; borrowed.
struct SpanField {
    std::byte* destination;
    std::uint64_t token_nbytes;
    unsigned char pad;            ///< every byte of the padding: 0 is zero, 0xff is -1
    std::vector<Source> sources;  ///< one per span
};

/// Writes every byte of the positions.
void fill_spans(const SpanField& field, const std::vector<Span>& spans, const Part& part);

/// int32: 1..n from left to right in each row, 0 elsewhere.
void fill_segment_ids(std::byte* destination, const std::vector<Span>& spans, const Part& part);

/// int32: first..first+length-1 in each segment, 0 elsewhere.
void fill_segment_positions(std::byte* destination, const std::vector<Span>& spans, const Part& part);

/// The first span that ends after `position`, by its index.
std::size_t span_after(const std::vector<Span>& spans, std::uint64_t position);

/// In order of position: pad(count) for what lies between spans, write(index of span, first token, count) for the rest.
template <typename Pad, typename Write>
void walk(const std::vector<Span>& spans, const Part& part, Pad pad, Write write) {
    std::uint64_t at = part.first;
    for (std::size_t i = span_after(spans, at); i < spans.size() && spans[i].begin < part.last; ++i) {
        const Span& span = spans[i];
        const std::uint64_t begin = std::max(span.begin, at);
        const std::uint64_t end = std::min(span.begin + span.length, part.last);
        pad(begin - at);
        write(i, begin - span.begin, end - begin);
        at = end;
    }
    pad(part.last - at);
}

}  // namespace shmstage
