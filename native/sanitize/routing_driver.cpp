// Routing encodings and the sharing of work, against a plain reference, in buffers that end where they end.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "../fill.h"
#include "../parallel.h"
#include "../record.h"
#include "../routing.h"
#include "../window.h"
#include "checks.h"

namespace {

using namespace shmstage;

using Ids = std::vector<std::int16_t>;
using Bytes = std::vector<std::byte>;

const std::byte* bytes_of(const Ids& ids) { return reinterpret_cast<const std::byte*>(ids.data()); }

Ids random_ids(Dice& dice, std::uint64_t tokens, const RoutingShape& shape) {
    Ids ids(tokens * shape.ids());
    for (std::uint64_t choice = 0; choice < tokens * shape.layers; ++choice) {
        const bool unset = dice.below(4) == 0;
        for (std::uint64_t k = 0; k < shape.top_k; ++k) {
            ids[choice * shape.top_k + k] =
                unset ? std::int16_t{-1} : static_cast<std::int16_t>(dice.below(std::uint64_t{1} << shape.bits));
        }
    }
    return ids;
}

/// Bit by bit. `dense` holds whole groups.
void pack_plainly(const Ids& dense, const RoutingShape& shape, Bytes& ids, Bytes& validity) {
    const std::uint64_t groups = dense.size() / shape.ids() / kGroup;
    ids.assign(groups * shape.group_nbytes(), std::byte{0});
    validity.assign(groups * shape.layers, std::byte{0});
    for (std::uint64_t token = 0; token < groups * kGroup; ++token) {
        const std::uint64_t group = token / kGroup;
        const std::uint64_t lane = token % kGroup;
        for (std::uint64_t index = 0; index < shape.ids(); ++index) {
            const std::int16_t id = dense[token * shape.ids() + index];
            if (id < 0) continue;
            validity[group * shape.layers + index / shape.top_k] |= std::byte{1} << static_cast<int>(lane);
            for (unsigned bit = 0; bit < shape.bits; ++bit) {
                const std::uint64_t at = lane * shape.bits + bit;
                if ((id >> bit & 1) != 0) {
                    ids[(group * shape.ids() + index) * shape.bits + at / 8] |= std::byte{1} << static_cast<int>(at % 8);
                }
            }
        }
    }
}

Bytes held_plainly(Ids dense, const RoutingShape& shape) {
    const std::uint64_t tokens = dense.size() / shape.ids();
    dense.resize((tokens + kGroup - 1) / kGroup * kGroup * shape.ids(), -1);
    Bytes ids;
    Bytes validity;
    pack_plainly(dense, shape, ids, validity);
    ids.insert(ids.end(), validity.begin(), validity.end());
    return ids;
}

std::vector<Part> random_parts(Dice& dice, std::uint64_t positions) {
    std::uint64_t a = dice.below(positions + 1);
    std::uint64_t b = dice.below(positions + 1);
    if (a > b) std::swap(a, b);
    return {{0, a, dice.below(2) == 0}, {a, b, dice.below(2) == 0}, {b, positions, dice.below(2) == 0}};
}

void check_routing(Dice& dice) {
    const RoutingShape shape{1 + dice.below(4), 1 + dice.below(9), 1 + static_cast<unsigned>(dice.below(kMostBits))};
    std::vector<Segment> segments;
    std::vector<Ids> dense;
    std::vector<Bytes> held;
    std::uint64_t real = 0;
    for (std::uint64_t row = 0; row < 3; ++row) {
        for (std::uint64_t at = dice.below(4); at < 30 && dice.below(5) != 0; at += segments.back().length + dice.below(3)) {
            segments.push_back({row, at, dice.below(std::min<std::uint64_t>(31 - at, 20))});
            real += segments.back().length;
            dense.push_back(random_ids(dice, segments.back().length - (segments.back().length != 0 ? dice.below(2) : 0), shape));
            held.push_back(held_plainly(dense.back(), shape));
        }
    }
    CHECK(segments_fault(segments, 3, 30) == nullptr);
    std::vector<RoutingSource> sources;
    for (std::size_t i = 0; i < dense.size(); ++i) {
        const std::uint64_t tokens = dense[i].size() / shape.ids();
        sources.push_back({bytes_of(dense[i]), tokens, false});
        Bytes packed(held_nbytes(shape, tokens));
        pack_routing(packed.data(), bytes_of(dense[i]), tokens, shape);
        CHECK(packed == held[i]);
        Ids back(dense[i].size());
        unpack_routing(reinterpret_cast<std::byte*>(back.data()), held[i].data(), tokens, shape);
        CHECK(back == dense[i]);
        if (dice.below(2) == 0) sources.back() = held_source(held[i].data(), 0, tokens, shape);
    }

    const std::uint64_t groups = (real + kGroup - 1) / kGroup + dice.below(2);
    Ids want(groups * kGroup * shape.ids(), -1);
    Ids want_padded(3 * 30 * shape.ids(), -1);
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const std::uint64_t place = (segments[i].row * 30 + segments[i].start) * shape.ids();
        std::copy(dense[i].begin(), dense[i].end(), want.begin() + static_cast<std::ptrdiff_t>(at * shape.ids()));
        std::copy(dense[i].begin(), dense[i].end(), want_padded.begin() + static_cast<std::ptrdiff_t>(place));
        at += segments[i].length;
    }
    const std::vector<Span> compact = compact_spans(segments);
    Ids ragged(want.size());
    for (const Part& part : random_parts(dice, groups * kGroup)) {
        fill_dense_routing(reinterpret_cast<std::byte*>(ragged.data()), shape, sources, compact, part);
    }
    CHECK(ragged == want);
    Ids padded(want_padded.size());
    for (const Part& part : random_parts(dice, 3 * 30)) {
        fill_dense_routing(reinterpret_cast<std::byte*>(padded.data()), shape, sources, padded_spans(segments, 30), part);
    }
    CHECK(padded == want_padded);
    Bytes want_ids;
    Bytes want_validity;
    pack_plainly(want, shape, want_ids, want_validity);
#ifdef SEED_OVERRUN
    Bytes ids(want_ids.size() - (want_ids.empty() ? 0 : 1));
#else
    Bytes ids(want_ids.size());
#endif
    Bytes validity(want_validity.size());
    for (const Part& part : random_parts(dice, groups)) {
        fill_packed_routing({ids.data(), validity.data()}, shape, sources, compact, part);
    }
    CHECK(ids == want_ids && validity == want_validity);
}

/// Tokens of one segment as they lie in a piece, which has no byte more.
struct Piece {
    Bytes words;
    Ids dense;
    Bytes held;
    Record record;
    std::uint64_t before;  ///< tokens that the window does not need, at either end
    std::uint64_t after;
};

/// `begin` to `end` of a segment's words and routing; held in whole groups.
Piece piece_of(Dice& dice, const std::vector<std::int32_t>& words, const Ids& routing, std::uint64_t begin,
               std::uint64_t end, const RoutingShape& shape) {
    Piece piece;
    const auto* from = reinterpret_cast<const std::byte*>(words.data());
    piece.words.assign(from + begin * kWordNbytes, from + end * kWordNbytes);
    const std::uint64_t routed = std::max(std::min(end, routing.size() / shape.ids()), begin) - begin;
    piece.record.begin = begin;
    piece.record.tokens = end - begin;
    piece.record.shape = shape;
    piece.record.words[1] = piece.words.data();
    const auto at = [&](std::uint64_t token) { return routing.begin() + static_cast<std::ptrdiff_t>(token * shape.ids()); };
    if (dice.below(2) == 0) {
        piece.dense.assign(at(begin), at(begin + routed));
        piece.record.routing = {bytes_of(piece.dense), routed, false};
        return piece;
    }
    const std::uint64_t skipped = routed == 0 ? 0 : begin % kGroup;
    // what else is in its first and last group is not the window's, and must not be seen
    const std::uint64_t last = std::min((begin + routed + kGroup - 1) / kGroup * kGroup, routing.size() / shape.ids());
    piece.held = held_plainly(routed == 0 ? Ids() : Ids(at(begin - skipped), at(last)), shape);
#ifdef SEED_SHORT_PIECE
    if (!piece.held.empty()) piece.held.pop_back();
    piece.held.shrink_to_fit();
#endif
    piece.record.routing = held_source(piece.held.data(), skipped, routed, shape);
    return piece;
}

template <typename Value>
const std::byte* raw(const std::vector<Value>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
}

template <typename Value>
std::byte* raw(std::vector<Value>& values) {
    return reinterpret_cast<std::byte*>(values.data());
}

/// A random rectangle of a random micro-batch, from pieces that hold its tokens and sometimes a few more.
void check_window(Dice& dice) {
    constexpr std::uint64_t kRows = 4;
    constexpr std::uint64_t kTokens = 40;
    const RoutingShape shape{1 + dice.below(4), 1 + dice.below(9), 1 + static_cast<unsigned>(dice.below(kMostBits))};
    const auto edges = [&](std::uint64_t most) {
        const std::uint64_t begin = dice.below(most);
        return std::pair<std::uint64_t, std::uint64_t>{begin, begin + 1 + dice.below(most - begin)};
    };
    const auto [row_begin, row_end] = edges(kRows);
    const auto [token_begin, token_end] = edges(kTokens);
    const Rectangle window{row_begin, row_end, token_begin, token_end};
    const std::uint64_t tokens = token_end - token_begin;
    const std::uint64_t places = (row_end - row_begin) * tokens;

    std::vector<Segment> segments;
    std::vector<Piece> pieces;
    pieces.reserve(kRows * kTokens);
    std::vector<const Record*> records;
    std::vector<std::int32_t> want_ids(places);
    std::vector<std::int32_t> want_positions(places);
    std::vector<std::int32_t> want_words(places);
    std::vector<std::int32_t> want_offsets{0};
    Ids want_dense(places * shape.ids(), -1);
    Ids want_compact;
    for (std::uint64_t row = 0; row < kRows; ++row) {
        std::int32_t number = 0;
        for (std::uint64_t at = dice.below(4); at < kTokens && dice.below(5) != 0; at += segments.back().length + dice.below(3)) {
            const std::uint64_t length = dice.below(std::min<std::uint64_t>(kTokens + 1 - at, 35));
            segments.push_back({row, at, length});
            ++number;
            std::vector<std::int32_t> words(length);
            for (std::int32_t& word : words) word = static_cast<std::int32_t>(dice.below(1000));
            const Ids routing = random_ids(dice, length - (length != 0 ? dice.below(2) : 0), shape);
            const std::uint64_t first = std::min(std::max(token_begin, at) - at, length);
            const std::uint64_t last = std::max(std::min(std::max(token_end, at) - at, length), first);
            records.push_back(nullptr);
            if (row < row_begin || row >= row_end || first == last) continue;
            const std::uint64_t before = dice.below(first + 1);
            const std::uint64_t after = dice.below(length - last + 1);
            pieces.push_back(piece_of(dice, words, routing, first - before, last + after, shape));
            pieces.back().before = before;
            pieces.back().after = after;
            records.back() = &pieces.back().record;
            for (std::uint64_t token = first; token < last; ++token) {
                const std::uint64_t place = (row - row_begin) * tokens + at + token - token_begin;
                want_ids[place] = number;
                want_positions[place] = static_cast<std::int32_t>(token);
                want_words[place] = words[token];
                for (std::uint64_t index = 0; index < shape.ids(); ++index) {
                    const std::uint64_t from = token * shape.ids() + index;
                    want_compact.push_back(from < routing.size() ? routing[from] : std::int16_t{-1});
                    want_dense[place * shape.ids() + index] = want_compact.back();
                }
            }
        }
        if (row >= row_begin && row < row_end) {
            want_offsets.push_back(static_cast<std::int32_t>(want_compact.size() / shape.ids()));
        }
    }
    CHECK(segments_fault(segments, kRows, kTokens) == nullptr);

    const std::vector<Cut> cuts = cuts_of(segments, window);
    CHECK(covered(cuts, records));
    CHECK(tokens_of(cuts) == want_compact.size() / shape.ids());
    std::vector<std::int32_t> offsets(want_offsets.size());
    fill_offsets(raw(offsets), places_of(cuts), row_end - row_begin);
    CHECK(offsets == want_offsets);
    const std::vector<Span> padded = padded_spans(cuts, tokens);
    const std::vector<RoutingSource> sources = routing_of(cuts, records);
    std::vector<std::int32_t> ids(places);
    std::vector<std::int32_t> positions(places);
    std::vector<std::int32_t> words(places);
    Ids dense(want_dense.size());
    const SpanField field{raw(words), kWordNbytes, 0, words_of(cuts, records, 1)};
    for (const Part& part : random_parts(dice, places)) {
        fill_segment_ids(raw(ids), padded, part);
        fill_segment_positions(raw(positions), padded, part);
        fill_spans(field, padded, part);
        fill_dense_routing(raw(dense), shape, sources, padded, part);
    }
    CHECK(ids == want_ids && positions == want_positions && words == want_words && dense == want_dense);

    const std::uint64_t groups = (want_compact.size() / shape.ids() + kGroup - 1) / kGroup + dice.below(2);
    want_compact.resize(groups * kGroup * shape.ids(), -1);
    Bytes want_packed;
    Bytes want_validity;
    pack_plainly(want_compact, shape, want_packed, want_validity);
    Bytes packed(want_packed.size());
    Bytes validity(want_validity.size());
    for (const Part& part : random_parts(dice, groups)) {
        fill_packed_routing({packed.data(), validity.data()}, shape, sources, compact_spans(cuts), part);
    }
    CHECK(packed == want_packed && validity == want_validity);

    for (Piece& piece : pieces) {
        // a piece a token short at either end is not taken for whole
        --piece.record.tokens;
        CHECK(covered(cuts, records) == (piece.after != 0));
        ++piece.record.begin;
        CHECK(covered(cuts, records) == (piece.before != 0));
        --piece.record.begin;
        ++piece.record.tokens;
    }
}

void check_faults(Dice& dice) {
    const std::uint64_t top_k = 1 + dice.below(8);
    const std::uint64_t count = dice.below(20);
    std::vector<std::int16_t> routing;
    std::int64_t want = -1;
    for (std::uint64_t choice = 0; choice < count; ++choice) {
        const bool unset = dice.below(4) == 0;
        const std::uint64_t first = dice.below(16 - top_k + 1);
        for (std::uint64_t k = 0; k < top_k; ++k) {
            routing.push_back(unset ? std::int16_t{-1} : static_cast<std::int16_t>(first + k));
        }
        if (dice.below(20) == 0 && want < 0) {
            const std::int16_t bad[] = {16, -2, std::numeric_limits<std::int16_t>::min(), 0x7fff};
            routing[routing.size() - 1 - dice.below(top_k)] = bad[dice.below(4)];
            want = static_cast<std::int64_t>(choice);
        }
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(routing.data());
    CHECK(routing_fault(bytes, count, top_k, 16) == want);
}

void check_records(Dice& dice) {
    std::vector<Record> made(1 + dice.below(5));
    std::vector<Bytes> words;
    std::vector<const Record*> records;
    Totals want{0, 0, 0};
    for (Record& record : made) {
        record.tokens = dice.below(4);
        record.loss_tokens = record.tokens == 0 ? 0 : dice.below(2);
        record.present = 1U << (kMostFields - 1);
        record.shape = {2, 3, 0};
        words.emplace_back(record.tokens * kWordNbytes);
        record.words[kMostFields - 1] = words.back().data();
        record.routing = {words.back().data(), record.tokens, dice.below(2) == 0};
        records.push_back(&record);
        want = {want.tokens + record.tokens, want.loss_tokens + record.loss_tokens,
                want.trained + (record.loss_tokens != 0 ? 1 : 0)};
        CHECK(same_kind(record, made.front()));
    }
    const Totals totals = totals_of(records);
    CHECK(totals.tokens == want.tokens && totals.loss_tokens == want.loss_tokens && totals.trained == want.trained);
    const std::vector<Source> sources = words_of(records, kMostFields - 1);
    const std::vector<RoutingSource> routing = routing_of(records);
    for (std::size_t i = 0; i < records.size(); ++i) {
        CHECK(sources[i].data == words[i].data() && sources[i].tokens == made[i].tokens);
        CHECK(routing[i].data == words[i].data() && routing[i].held == made[i].routing.held);
    }
    Record other = made.front();
    other.shape.bits = 9;  // held otherwise, but the same
    CHECK(same_kind(other, made.front()));
    other.experts = 5;
    CHECK(!same_kind(other, made.front()));
    other = made.front();
    other.shape.top_k = 4;
    CHECK(!same_kind(other, made.front()));
    other = made.front();
    other.present = 3;
    CHECK(!same_kind(other, made.front()));
}

void check_offsets() {
    std::vector<std::int32_t> offsets(4);
    fill_offsets(reinterpret_cast<std::byte*>(offsets.data()), {{0, 1, 3}, {0, 5, 2}, {2, 0, 7}}, 3);
    CHECK(offsets == (std::vector<std::int32_t>{0, 5, 5, 12}));
}

/// Threads share one field; every byte of it is written by one of them.
void check_sharing(unsigned threads) {
    const std::uint64_t positions = 3'000'011;
    const std::vector<Segment> segments{{0, 5, 1'000'000}, {0, 1'500'001, 1'400'000}};
    const std::vector<Span> spans = padded_spans(segments, positions);
    Bytes ids(positions * sizeof(std::int32_t));
    Bytes places(ids.size());
    std::uint64_t written = 0;
    Work work;
    work.add(positions, sizeof(std::int32_t), [&](const Part& part) {
#ifdef SEED_RACE
        written += part.last - part.first;
        fill_segment_ids(ids.data(), spans, {0, part.last, part.streaming});
#else
        fill_segment_ids(ids.data(), spans, part);
#endif
    });
    work.add(positions, sizeof(std::int32_t),
             [&](const Part& part) { fill_segment_positions(places.data(), spans, part); });
    work.run(threads);
    for (std::uint64_t i = 0; i < positions; i += 997) {
        const bool first = i >= 5 && i < 1'000'005;
        const bool second = i >= 1'500'001 && i < 2'900'001;
        std::int32_t id = 0;
        std::int32_t place = 0;
        std::memcpy(&id, ids.data() + i * sizeof id, sizeof id);
        std::memcpy(&place, places.data() + i * sizeof place, sizeof place);
        CHECK(id == (first ? 1 : second ? 2 : 0));
        CHECK(place == static_cast<std::int32_t>(first ? i - 5 : second ? i - 1'500'001 : 0));
    }
    CHECK(written <= positions);
}

}  // namespace

int main() {
    Dice dice(2);
    for (int round = 0; round < 300; ++round) {
        check_routing(dice);
        check_window(dice);
        check_faults(dice);
        check_records(dice);
    }
    check_offsets();
    check_sharing(0);
    check_sharing(1);
    check_sharing(3);
    std::printf("300 rounds\n");
    return 0;
}
