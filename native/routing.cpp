#include "routing.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "sink.h"

namespace shmstage {

namespace {

using Rows = std::array<const std::byte*, kGroup>;  ///< the dense ids of each token of a group

__extension__ typedef unsigned __int128 Word;  ///< the 8 ids of one (layer, k)

std::int16_t id_at(const std::byte* row, std::uint64_t index) {
    std::int16_t id = 0;
    std::memcpy(&id, row + index * sizeof id, sizeof id);
    return id;
}

Word load_word(const std::byte* from, unsigned nbytes) {
    Word word = 0;
    for (unsigned i = 0; i < nbytes; ++i) word |= static_cast<Word>(std::to_integer<unsigned>(from[i])) << (8 * i);
    return word;
}

void store_word(std::byte* to, Word word, unsigned nbytes) {
    for (unsigned i = 0; i < nbytes; ++i) to[i] = static_cast<std::byte>(word >> (8 * i));
}

std::byte lanes(std::uint64_t first, std::uint64_t count) {
    return static_cast<std::byte>(((1U << count) - 1U) << first);
}

/// Ids of a group, [layers, top_k, bits], from the rows of its tokens.
void pack_ids(Sink& sink, const Rows& rows, const RoutingShape& shape) {
    const auto mask = static_cast<unsigned>((1U << shape.bits) - 1U);
    for (std::uint64_t index = 0; index < shape.ids(); ++index) {
        Word word = 0;
        for (unsigned j = 0; j < kGroup; ++j) {
            const std::int16_t id = id_at(rows[j], index);
            if (id > 0) word |= static_cast<Word>(static_cast<unsigned>(id) & mask) << (j * shape.bits);
        }
        store_word(sink.room(shape.bits), word, shape.bits);
        sink.commit(shape.bits);
    }
}

void pack_validity(Sink& sink, const Rows& rows, const RoutingShape& shape) {
    for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
        unsigned set = 0;
        for (unsigned j = 0; j < kGroup; ++j) {
            if (id_at(rows[j], layer * shape.top_k) >= 0) set |= 1U << j;
        }
        *sink.room(1) = static_cast<std::byte>(set);
        sink.commit(1);
    }
}

/// The dense rows of a group's tokens, one after another, all 8 of them.
void unpack_group(std::byte* dense, const std::byte* ids, const std::byte* validity, const RoutingShape& shape) {
    const auto mask = static_cast<unsigned>((1U << shape.bits) - 1U);
    for (std::uint64_t index = 0; index < shape.ids(); ++index) {
        const Word word = load_word(ids + index * shape.bits, shape.bits);
        const auto set = std::to_integer<unsigned>(validity[index / shape.top_k]);
        for (unsigned j = 0; j < kGroup; ++j) {
            const unsigned value = static_cast<unsigned>(word >> (j * shape.bits)) & mask;
            const auto id = static_cast<std::int16_t>((set >> j & 1U) != 0 ? static_cast<int>(value) : -1);
            std::memcpy(dense + j * shape.token_nbytes() + index * sizeof id, &id, sizeof id);
        }
    }
}

/// Where a held source keeps its validity.
const std::byte* held_validity(const std::byte* held, std::uint64_t tokens, const RoutingShape& shape) {
    return held + (tokens + kGroup - 1) / kGroup * shape.group_nbytes();
}

/// Calls write(rows of the dense tokens [first, first + count), count <= 8) for a held source, group by group.
template <typename Write>
void unpack_tokens(const std::byte* held, std::uint64_t tokens, std::uint64_t first, std::uint64_t count,
                   const RoutingShape& shape, std::vector<std::byte>& scratch, Write write) {
    scratch.resize(kGroup * shape.token_nbytes());
    const std::byte* validity = held_validity(held, tokens, shape);
    for (std::uint64_t at = first; at < first + count;) {
        const std::uint64_t group = at / kGroup;
        const std::uint64_t lane = at % kGroup;
        const std::uint64_t some = std::min(kGroup - lane, first + count - at);
        unpack_group(scratch.data(), held + group * shape.group_nbytes(), validity + group * shape.layers, shape);
        write(scratch.data() + lane * shape.token_nbytes(), some);
        at += some;
    }
}

/// Tokens of one source that lie together in one group of the destination.
struct Piece {
    const RoutingSource* source;
    std::uint64_t first;  ///< in the source
    std::uint64_t count;
    std::uint64_t lane;   ///< in the destination
};

/// Up to 8 pieces: the tokens of a group that have routing.
class Pieces {
  public:
    void add(const Piece& piece) { pieces_[count_++] = piece; }
    const Piece* begin() const { return pieces_.data(); }
    const Piece* end() const { return pieces_.data() + count_; }
    bool empty() const { return count_ == 0; }
    bool any_held() const {
        return std::any_of(begin(), end(), [](const Piece& piece) { return piece.source->held; });
    }

  private:
    std::array<Piece, kGroup> pieces_;
    std::size_t count_ = 0;
};

/// The pieces of the group that begins at `position`; `i` is the first span that ends after it, and is moved on.
Pieces pieces_of(std::uint64_t position, std::size_t& i, const std::vector<Span>& spans,
                 const std::vector<RoutingSource>& sources) {
    Pieces pieces;
    const std::uint64_t end = position + kGroup;
    while (i < spans.size() && spans[i].begin < end) {
        const Span& span = spans[i];
        const std::uint64_t from = std::max(span.begin, position);
        const std::uint64_t first = from - span.begin;
        const std::uint64_t last = std::min(std::min(span.length, sources[i].tokens), end - span.begin);
        if (last > first) pieces.add({&sources[i], first, last - first, from - position});
        if (span.begin + span.length > end) break;
        ++i;
    }
    return pieces;
}

/// Held tokens ored into a group, without unpacking them.
void merge(std::byte* ids, std::byte* validity, const Piece& piece, const RoutingShape& shape) {
    const std::byte* held = piece.source->data;
    const std::byte* held_set = held_validity(held, piece.source->tokens, shape);
    std::uint64_t lane = piece.lane;
    for (std::uint64_t at = piece.first; at < piece.first + piece.count;) {
        const std::uint64_t group = at / kGroup;
        const std::uint64_t from = at % kGroup;
        const std::uint64_t some = std::min(kGroup - from, piece.first + piece.count - at);
        const Word mask = (static_cast<Word>(1) << (some * shape.bits)) - 1;
        const std::byte* source = held + group * shape.group_nbytes();
        for (std::uint64_t index = 0; index < shape.ids(); ++index) {
            const Word word = load_word(source + index * shape.bits, shape.bits) >> (from * shape.bits) & mask;
            std::byte* to = ids + index * shape.bits;
            store_word(to, load_word(to, shape.bits) | word << (lane * shape.bits), shape.bits);
        }
        for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
            const std::byte set = held_set[group * shape.layers + layer] & lanes(from, some);
            validity[layer] |= set >> static_cast<int>(from) << static_cast<int>(lane);
        }
        lane += some;
        at += some;
    }
}

}  // namespace

std::uint64_t held_nbytes(const RoutingShape& shape, std::uint64_t tokens) {
    return (tokens + kGroup - 1) / kGroup * (shape.group_nbytes() + shape.layers);
}

void pack_routing(std::byte* held, const std::byte* dense, std::uint64_t tokens, const RoutingShape& shape) {
    const std::vector<Span> spans{{0, tokens, 0}};
    const std::vector<RoutingSource> sources{{dense, tokens, false}};
    const std::uint64_t groups = (tokens + kGroup - 1) / kGroup;
    fill_packed_routing({held, held + groups * shape.group_nbytes()}, shape, sources, spans, {0, groups, false});
}

void unpack_routing(std::byte* dense, const std::byte* held, std::uint64_t tokens, const RoutingShape& shape) {
    fill_dense_routing(dense, shape, {{held, tokens, true}}, {{0, tokens, 0}}, {0, tokens, false});
}

void fill_dense_routing(std::byte* destination, const RoutingShape& shape, const std::vector<RoutingSource>& sources,
                        const std::vector<Span>& spans, const Part& part) {
    const std::uint64_t each = shape.token_nbytes();
    Sink sink(destination + part.first * each, part.streaming);
    std::vector<std::byte> scratch;
    walk(
        spans, part, [&](std::uint64_t count) { sink.fill(0xff, count * each); },
        [&](std::size_t i, std::uint64_t first, std::uint64_t count) {
            const RoutingSource& source = sources[i];
            const std::uint64_t given = source.tokens > first ? std::min(count, source.tokens - first) : 0;
            if (given != 0 && source.held) {
                unpack_tokens(source.data, source.tokens, first, given, shape, scratch,
                              [&](const std::byte* rows, std::uint64_t some) { sink.copy(rows, some * each); });
            } else if (given != 0) {
                sink.copy(source.data + first * each, given * each);
            }
            sink.fill(0xff, (count - given) * each);
        });
    sink.finish();
}

void fill_packed_routing(const PackedRouting& field, const RoutingShape& shape,
                         const std::vector<RoutingSource>& sources, const std::vector<Span>& spans, const Part& part) {
    Sink ids(field.ids + part.first * shape.group_nbytes(), part.streaming);
    Sink validity(field.validity + part.first * shape.layers, part.streaming);
    const std::vector<std::byte> unset(shape.token_nbytes(), std::byte{0xff});
    std::vector<std::byte> merged;  // one group
    std::vector<std::byte> scratch;
    std::size_t i = span_after(spans, part.first * kGroup);
    for (std::uint64_t group = part.first; group < part.last; ++group) {
        const Pieces pieces = pieces_of(group * kGroup, i, spans, sources);
        if (pieces.empty()) {
            ids.fill(0, shape.group_nbytes());
            validity.fill(0, shape.layers);
            continue;
        }
        Rows rows;
        rows.fill(unset.data());
        for (const Piece& piece : pieces) {
            if (piece.source->held) continue;
            for (std::uint64_t t = 0; t < piece.count; ++t) {
                rows[piece.lane + t] = piece.source->data + (piece.first + t) * shape.token_nbytes();
            }
        }
        if (!pieces.any_held()) {
            pack_ids(ids, rows, shape);
            pack_validity(validity, rows, shape);
            continue;
        }
        merged.resize(shape.group_nbytes() + shape.layers);
        Sink first_ids(merged.data(), false);
        Sink first_validity(merged.data() + shape.group_nbytes(), false);
        pack_ids(first_ids, rows, shape);
        pack_validity(first_validity, rows, shape);
        for (const Piece& piece : pieces) {
            if (piece.source->held) merge(merged.data(), merged.data() + shape.group_nbytes(), piece, shape);
        }
        ids.copy(merged.data(), shape.group_nbytes());
        validity.copy(merged.data() + shape.group_nbytes(), shape.layers);
    }
    ids.finish();
    validity.finish();
}

void fill_offsets(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows) {
    std::size_t i = 0;
    std::int32_t offset = 0;
    for (std::uint64_t row = 0; row <= rows; ++row) {
        std::memcpy(destination + row * sizeof offset, &offset, sizeof offset);
        for (; i < segments.size() && segments[i].row == row; ++i) offset += static_cast<std::int32_t>(segments[i].length);
    }
}

std::int64_t routing_fault(const std::byte* routing, std::uint64_t count, std::uint64_t top_k, std::int32_t experts) {
    // last_seen[id] = number of the choice that had it last, so that nothing is cleared between choices
    std::vector<std::uint64_t> last_seen(static_cast<std::size_t>(experts), 0);
    for (std::uint64_t choice = 0; choice < count; ++choice) {
        std::uint64_t unset = 0;
        for (std::uint64_t k = 0; k < top_k; ++k) {
            const std::int16_t id = id_at(routing, choice * top_k + k);
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
