#include "window.h"

#include <algorithm>

namespace shmstage {

std::vector<Cut> cuts_of(const std::vector<Segment>& segments, const Rectangle& within) {
    std::vector<Cut> cuts;
    std::uint64_t row = 0;
    std::int32_t number = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const Segment& segment = segments[i];
        number = segment.row == row ? number + 1 : 1;
        row = segment.row;
        if (row < within.row_begin || row >= within.row_end) continue;
        const std::uint64_t begin = std::max(segment.start, within.token_begin);
        const std::uint64_t end = std::min(segment.start + segment.length, within.token_end);
        if (end <= begin) continue;
        const Segment place{row - within.row_begin, begin - within.token_begin, end - begin};
        cuts.push_back({i, place, begin - segment.start, number});
    }
    return cuts;
}

std::uint64_t tokens_of(const std::vector<Cut>& cuts) {
    std::uint64_t tokens = 0;
    for (const Cut& cut : cuts) tokens += cut.place.length;
    return tokens;
}

std::vector<Span> padded_spans(const std::vector<Cut>& cuts, std::uint64_t tokens) {
    std::vector<Span> spans;
    spans.reserve(cuts.size());
    for (const Cut& cut : cuts) {
        spans.push_back({cut.place.row * tokens + cut.place.start, cut.place.length, cut.number, cut.first});
    }
    return spans;
}

std::vector<Span> compact_spans(const std::vector<Cut>& cuts) {
    std::vector<Span> spans;
    spans.reserve(cuts.size());
    std::uint64_t at = 0;
    for (const Cut& cut : cuts) {
        spans.push_back({at, cut.place.length, cut.number, cut.first});
        at += cut.place.length;
    }
    return spans;
}

bool covered(const std::vector<Cut>& cuts, const std::vector<const Record*>& records) {
    return std::all_of(cuts.begin(), cuts.end(), [&](const Cut& cut) {
        const Record* record = records[cut.segment];
        if (record == nullptr || cut.first < record->begin) return false;
        // subtraction: the record says where it begins
        const std::uint64_t before = cut.first - record->begin;
        return before <= record->tokens && cut.place.length <= record->tokens - before;
    });
}

std::vector<Source> words_of(const std::vector<Cut>& cuts, const std::vector<const Record*>& records,
                             std::size_t number) {
    std::vector<Source> sources;
    sources.reserve(cuts.size());
    for (const Cut& cut : cuts) {
        const Record& record = *records[cut.segment];
        sources.push_back({record.words[number] + (cut.first - record.begin) * kWordNbytes, cut.place.length});
    }
    return sources;
}

std::vector<RoutingSource> routing_of(const std::vector<Cut>& cuts, const std::vector<const Record*>& records) {
    std::vector<RoutingSource> sources;
    sources.reserve(cuts.size());
    for (const Cut& cut : cuts) {
        const Record& record = *records[cut.segment];
        sources.push_back(part_of(record.routing, cut.first - record.begin, cut.place.length, record.shape));
    }
    return sources;
}

std::vector<Segment> places_of(const std::vector<Cut>& cuts) {
    std::vector<Segment> places;
    places.reserve(cuts.size());
    for (const Cut& cut : cuts) places.push_back(cut.place);
    return places;
}

}  // namespace shmstage
