#include "fill.h"

#include <cstring>

namespace shmstage {

namespace {

void pad_bytes(std::byte* begin, const std::byte* end, unsigned char pad) {
    if (begin != end) std::memset(begin, pad, static_cast<std::size_t>(end - begin));
}

void put_int32(std::byte* destination, std::uint64_t index, std::int32_t value) {
    std::memcpy(destination + index * sizeof value, &value, sizeof value);
}

/// Calls write(segment, begin of its span, number of it in its row), and pads what lies between the spans.
template <typename Write>
void walk(std::byte* destination, std::uint64_t token_nbytes, unsigned char pad,
          const std::vector<Segment>& segments, std::uint64_t rows, std::uint64_t tokens, Write write) {
    std::byte* written = destination;  // everything before it has its final value
    std::uint64_t row = 0;
    std::uint64_t number = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const Segment& segment = segments[i];
        number = segment.row == row ? number + 1 : 1;
        row = segment.row;
        std::byte* begin = destination + (row * tokens + segment.start) * token_nbytes;
        pad_bytes(written, begin, pad);
        write(i, begin, number);
        written = begin + segment.length * token_nbytes;
    }
    pad_bytes(written, destination + rows * tokens * token_nbytes, pad);
}

}  // namespace

const char* segments_fault(const std::vector<Segment>& segments, std::uint64_t rows, std::uint64_t tokens) {
    std::uint64_t row = 0;
    std::uint64_t used = 0;
    for (const Segment& segment : segments) {
        if (segment.row >= rows) return "row out of range";
        if (segment.row < row) return "rows out of order";
        if (segment.row > row) used = 0;
        row = segment.row;
        if (segment.start < used) return "segments overlap or are out of order";
        // subtraction: start + length could overflow
        if (segment.start > tokens || segment.length > tokens - segment.start) return "segment past its row's end";
        used = segment.start + segment.length;
    }
    return nullptr;
}

void fill_spans(const SpanField& field, const std::vector<Segment>& segments, std::uint64_t rows,
                std::uint64_t tokens) {
    walk(field.destination, field.token_nbytes, field.pad, segments, rows, tokens,
         [&](std::size_t i, std::byte* begin, std::uint64_t) {
             const Source& source = field.sources[i];
             const std::size_t nbytes = source.tokens * field.token_nbytes;
             if (nbytes != 0) std::memcpy(begin, source.data, nbytes);
             pad_bytes(begin + nbytes, begin + segments[i].length * field.token_nbytes, field.pad);
         });
}

void fill_segment_ids(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows,
                      std::uint64_t tokens) {
    walk(destination, sizeof(std::int32_t), 0, segments, rows, tokens,
         [&](std::size_t i, std::byte* begin, std::uint64_t number) {
             const auto id = static_cast<std::int32_t>(number);
             for (std::uint64_t t = 0; t < segments[i].length; ++t) put_int32(begin, t, id);
         });
}

void fill_segment_positions(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows,
                            std::uint64_t tokens) {
    walk(destination, sizeof(std::int32_t), 0, segments, rows, tokens,
         [&](std::size_t i, std::byte* begin, std::uint64_t) {
             for (std::uint64_t t = 0; t < segments[i].length; ++t) put_int32(begin, t, static_cast<std::int32_t>(t));
         });
}

std::int64_t routing_fault(const std::byte* routing, std::uint64_t count, std::uint64_t top_k,
                           std::int32_t experts) {
    // last_seen[id] = number of the choice that had it last, so that nothing is cleared between choices
    std::vector<std::uint64_t> last_seen(static_cast<std::size_t>(experts), 0);
    for (std::uint64_t choice = 0; choice < count; ++choice) {
        std::uint64_t unset = 0;
        for (std::uint64_t k = 0; k < top_k; ++k) {
            std::int16_t id = 0;
            std::memcpy(&id, routing + (choice * top_k + k) * sizeof id, sizeof id);
            if (id == -1) {
                ++unset;
                continue;
            }
            if (id < 0 || id >= experts) return static_cast<std::int64_t>(choice);
            std::uint64_t& seen = last_seen[static_cast<std::size_t>(id)];
            if (seen == choice + 1) return static_cast<std::int64_t>(choice);
            seen = choice + 1;
        }
        if (unset != 0 && unset != top_k) return static_cast<std::int64_t>(choice);
    }
    return -1;
}

}  // namespace shmstage
