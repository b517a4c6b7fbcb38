#include "fill.h"

#include <algorithm>
#include <cstring>

#include "sink.h"

namespace shmstage {

namespace {

/// Appends `count` int32, value(i) for the i-th of them.
template <typename Value>
void append_int32(Sink& sink, std::uint64_t count, Value value) {
    constexpr std::uint64_t kMost = Sink::kRoom / sizeof(std::int32_t);
    for (std::uint64_t done = 0; done < count;) {
        const std::uint64_t some = std::min(count - done, kMost);
        std::byte* room = sink.room(some * sizeof(std::int32_t));
        for (std::uint64_t i = 0; i < some; ++i) {
            const std::int32_t number = value(done + i);
            std::memcpy(room + i * sizeof number, &number, sizeof number);
        }
        sink.commit(some * sizeof(std::int32_t));
        done += some;
    }
}

/// How many spans ahead their sources are asked for, and how much of each; the rest the processor foresees.
constexpr std::size_t kAhead = 4;
constexpr std::uint64_t kAskedNbytes = 512;

void ask_for(const Source& source, std::uint64_t token_nbytes) {
    const std::uint64_t nbytes = std::min(source.tokens * token_nbytes, kAskedNbytes);
    for (std::uint64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(source.data + i);
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

std::vector<Span> padded_spans(const std::vector<Segment>& segments, std::uint64_t tokens) {
    std::vector<Span> spans;
    spans.reserve(segments.size());
    std::uint64_t row = 0;
    std::int32_t number = 0;
    for (const Segment& segment : segments) {
        number = segment.row == row ? number + 1 : 1;
        row = segment.row;
        spans.push_back({row * tokens + segment.start, segment.length, number});
    }
    return spans;
}

std::vector<Span> compact_spans(const std::vector<Segment>& segments) {
    std::vector<Span> spans;
    spans.reserve(segments.size());
    std::uint64_t at = 0;
    for (const Segment& segment : segments) {
        spans.push_back({at, segment.length, 0});
        at += segment.length;
    }
    return spans;
}

std::size_t span_after(const std::vector<Span>& spans, std::uint64_t position) {
    const auto found = std::partition_point(spans.begin(), spans.end(), [&](const Span& span) {
        return span.begin + span.length <= position;
    });
    return static_cast<std::size_t>(found - spans.begin());
}

void fill_spans(const SpanField& field, const std::vector<Span>& spans, const Part& part) {
    const std::uint64_t each = field.token_nbytes;
    Sink sink(field.destination + part.first * each, part.streaming);
    walk(
        spans, part, [&](std::uint64_t count) { sink.fill(field.pad, count * each); },
        [&](std::size_t i, std::uint64_t first, std::uint64_t count) {
            const Source& source = field.sources[i];
            // sources lie anywhere: what a short one costs is the wait for its first lines
            if (i + kAhead < spans.size()) ask_for(field.sources[i + kAhead], each);
            const std::uint64_t given = source.tokens > first ? std::min(count, source.tokens - first) : 0;
            if (given != 0) sink.copy(source.data + first * each, given * each);
            sink.fill(field.pad, (count - given) * each);
        });
    sink.finish();
}

void fill_segment_ids(std::byte* destination, const std::vector<Span>& spans, const Part& part) {
    Sink sink(destination + part.first * sizeof(std::int32_t), part.streaming);
    walk(
        spans, part, [&](std::uint64_t count) { sink.fill(0, count * sizeof(std::int32_t)); },
        [&](std::size_t i, std::uint64_t, std::uint64_t count) {
            const std::int32_t number = spans[i].number;  // a copy: what is written could alias the spans
            append_int32(sink, count, [number](std::uint64_t) { return number; });
        });
    sink.finish();
}

void fill_segment_positions(std::byte* destination, const std::vector<Span>& spans, const Part& part) {
    Sink sink(destination + part.first * sizeof(std::int32_t), part.streaming);
    walk(
        spans, part, [&](std::uint64_t count) { sink.fill(0, count * sizeof(std::int32_t)); },
        [&](std::size_t i, std::uint64_t first, std::uint64_t count) {
            const std::uint64_t begin = spans[i].first + first;
            append_int32(sink, count, [begin](std::uint64_t at) { return static_cast<std::int32_t>(begin + at); });
        });
    sink.finish();
}

}  // namespace shmstage
