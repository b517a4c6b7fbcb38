#include "routing.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "sink.h"

namespace shmstage {

namespace {

using Rows = std::array<const std::byte*, kGroup>;  ///< the dense ids of each token of a group

__extension__ typedef unsigned __int128 Wide;

/// The 8 ids of one (layer, k), token 0 lowest.
template <unsigned Bits>
using Word = std::conditional_t<Bits <= 8, std::uint64_t, Wide>;

template <unsigned Bits>
constexpr std::uint64_t kMask = (std::uint64_t{1} << Bits) - 1;

/// Calls call(integral constant): the width is known when the inner loops are compiled.
template <typename Call, unsigned... Less>
void with_bits(unsigned bits, Call call, std::integer_sequence<unsigned, Less...>) {
    static_cast<void>(((bits == Less + 1 && (call(std::integral_constant<unsigned, Less + 1>()), true)) || ...));
}

template <typename Call>
void with_bits(unsigned bits, Call call) {
    with_bits(bits, call, std::make_integer_sequence<unsigned, kMostBits>());
}

std::int16_t id_at(const std::byte* row, std::uint64_t index) {
    std::int16_t id = 0;
    std::memcpy(&id, row + index * sizeof id, sizeof id);
    return id;
}

// memcpy: the words are little-endian, and so is every machine this is built for
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <typename Number>
Number load(const std::byte* from) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

template <typename Number>
void store(std::byte* to, Number number) {
    std::memcpy(to, &number, sizeof number);
}

/// A word of `Bits` bytes moves as two overlapping halves: as an odd number of bytes it would go through memory.
template <unsigned Bits>
using Half = std::conditional_t<(Bits > 8), std::uint64_t,
                                std::conditional_t<(Bits > 4), std::uint32_t,
                                                   std::conditional_t<(Bits > 1), std::uint16_t, std::uint8_t>>>;

template <unsigned Bits>
Word<Bits> load_word(const std::byte* from) {
    constexpr unsigned kHalf = sizeof(Half<Bits>);
    const std::uint64_t low = load<Half<Bits>>(from);
    if constexpr (Bits == kHalf) {
        return low;
    } else {
        const std::uint64_t high = load<Half<Bits>>(from + Bits - kHalf);
        return low | static_cast<Word<Bits>>(high >> 8 * (2 * kHalf - Bits)) << 8 * kHalf;
    }
}

template <unsigned Bits>
void store_word(std::byte* to, Word<Bits> word) {
    constexpr unsigned kHalf = sizeof(Half<Bits>);
    store(to, static_cast<Half<Bits>>(word));
    if constexpr (Bits != kHalf) store(to + Bits - kHalf, static_cast<Half<Bits>>(word >> 8 * (Bits - kHalf)));
}

std::byte lanes(std::uint64_t first, std::uint64_t count) {
    return static_cast<std::byte>(((1U << count) - 1U) << first);
}

#if defined(__SSE2__)

/// 8 x 8 int16. Not a std::array: the compiler would ignore the alignment of its elements, and say so.
struct Eight {
    __m128i rows[kGroup];
    __m128i& operator[](unsigned i) { return rows[i]; }
    const __m128i& operator[](unsigned i) const { return rows[i]; }
};

Eight transposed(const Eight& x) {
    const __m128i a = _mm_unpacklo_epi16(x[0], x[1]);
    const __m128i b = _mm_unpackhi_epi16(x[0], x[1]);
    const __m128i c = _mm_unpacklo_epi16(x[2], x[3]);
    const __m128i d = _mm_unpackhi_epi16(x[2], x[3]);
    const __m128i e = _mm_unpacklo_epi16(x[4], x[5]);
    const __m128i f = _mm_unpackhi_epi16(x[4], x[5]);
    const __m128i g = _mm_unpacklo_epi16(x[6], x[7]);
    const __m128i h = _mm_unpackhi_epi16(x[6], x[7]);
    const __m128i i = _mm_unpacklo_epi32(a, c);
    const __m128i j = _mm_unpackhi_epi32(a, c);
    const __m128i k = _mm_unpacklo_epi32(b, d);
    const __m128i l = _mm_unpackhi_epi32(b, d);
    const __m128i m = _mm_unpacklo_epi32(e, g);
    const __m128i n = _mm_unpackhi_epi32(e, g);
    const __m128i o = _mm_unpacklo_epi32(f, h);
    const __m128i p = _mm_unpackhi_epi32(f, h);
    return {{_mm_unpacklo_epi64(i, m), _mm_unpackhi_epi64(i, m), _mm_unpacklo_epi64(j, n), _mm_unpackhi_epi64(j, n),
             _mm_unpacklo_epi64(k, o), _mm_unpackhi_epi64(k, o), _mm_unpacklo_epi64(l, p), _mm_unpackhi_epi64(l, p)}};
}

/// Words `index` to `index + 7`. Neighbouring lanes are joined three times: 16 to 32 to 64 to 128 bits.
template <unsigned Bits>
void pack_eight(std::byte* to, const Rows& rows, std::uint64_t index) {
    Eight ids;
    for (unsigned j = 0; j < kGroup; ++j) {
        ids[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j] + index * sizeof(std::int16_t)));
    }
    ids = transposed(ids);
    const __m128i low32 = _mm_set1_epi64x(0xffffffff);
    for (unsigned i = 0; i < kGroup; ++i) {
        const __m128i unset = _mm_srai_epi16(ids[i], 15);
        const __m128i mask = _mm_set1_epi16(static_cast<short>(kMask<Bits>));
        const __m128i cut = _mm_and_si128(_mm_andnot_si128(unset, ids[i]), mask);
        const __m128i even = _mm_and_si128(cut, _mm_set1_epi32(0xffff));
        const __m128i two = _mm_or_si128(even, _mm_slli_epi32(_mm_srli_epi32(cut, 16), Bits));
        const __m128i four = _mm_or_si128(_mm_and_si128(two, low32), _mm_slli_epi64(_mm_srli_epi64(two, 32), 2 * Bits));
        const auto low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(four));
        const auto high = static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(four, four)));
        store_word<Bits>(to + i * Bits, low | static_cast<Word<Bits>>(high) << 4 * Bits);
    }
}

/// Lanes whose bit in `set` is 0 are all ones.
__m128i unset_lanes(std::byte set) {
    const __m128i bits = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
    const __m128i all = _mm_set1_epi16(std::to_integer<short>(set));
    return _mm_cmpeq_epi16(_mm_and_si128(all, bits), _mm_setzero_si128());
}

template <unsigned Bits>
__m128i spread(Word<Bits> word) {
    constexpr std::uint64_t kFour = (std::uint64_t{1} << 4 * Bits) - 1;
    const auto low = static_cast<std::int64_t>(static_cast<std::uint64_t>(word) & kFour);
    const auto high = static_cast<std::int64_t>(static_cast<std::uint64_t>(word >> 4 * Bits));
    const __m128i four = _mm_set_epi64x(high, low);
    const __m128i two_mask = _mm_set1_epi64x((std::int64_t{1} << 2 * Bits) - 1);
    const __m128i two = _mm_or_si128(_mm_and_si128(four, two_mask), _mm_slli_epi64(_mm_srli_epi64(four, 2 * Bits), 32));
    const __m128i one_mask = _mm_set1_epi32(static_cast<int>(kMask<Bits>));
    return _mm_or_si128(_mm_and_si128(two, one_mask), _mm_slli_epi32(_mm_srli_epi32(two, Bits), 16));
}

#endif

/// Ids of a group, [layers, top_k, bits], from the rows of its tokens.
template <unsigned Bits>
void pack_ids(Sink& sink, const Rows& rows, const RoutingShape& shape) {
    std::uint64_t index = 0;
#if defined(__SSE2__)
    for (; index + kGroup <= shape.ids(); index += kGroup) {
        pack_eight<Bits>(sink.room(kGroup * Bits), rows, index);
        sink.commit(kGroup * Bits);
    }
#endif
    for (; index < shape.ids(); ++index) {
        Word<Bits> word = 0;
        for (unsigned j = 0; j < kGroup; ++j) {
            const std::int16_t id = id_at(rows[j], index);
            if (id > 0) word |= static_cast<Word<Bits>>(static_cast<std::uint64_t>(id) & kMask<Bits>) << j * Bits;
        }
        store_word<Bits>(sink.room(Bits), word);
        sink.commit(Bits);
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
template <unsigned Bits>
void unpack_group(std::byte* dense, const std::byte* ids, const std::byte* validity, const RoutingShape& shape) {
    std::uint64_t index = 0;
#if defined(__SSE2__)
    std::uint64_t layer = 0;
    std::uint64_t next_layer = shape.top_k;  // the index that begins it
    __m128i unset = unset_lanes(validity[0]);
    for (; index + kGroup <= shape.ids(); index += kGroup) {
        Eight words;
        for (unsigned i = 0; i < kGroup; ++i) {
            if (index + i == next_layer) {
                unset = unset_lanes(validity[++layer]);
                next_layer += shape.top_k;
            }
            words[i] = _mm_or_si128(spread<Bits>(load_word<Bits>(ids + (index + i) * Bits)), unset);
        }
        words = transposed(words);
        for (unsigned j = 0; j < kGroup; ++j) {
            std::byte* to = dense + j * shape.token_nbytes() + index * sizeof(std::int16_t);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words[j]);
        }
    }
#endif
    for (; index < shape.ids(); ++index) {
        const auto word = load_word<Bits>(ids + index * Bits);
        const auto set = std::to_integer<unsigned>(validity[index / shape.top_k]);
        for (unsigned j = 0; j < kGroup; ++j) {
            const auto value = static_cast<std::int16_t>(static_cast<std::uint64_t>(word >> j * Bits) & kMask<Bits>);
            const std::int16_t id = (set >> j & 1U) != 0 ? value : std::int16_t{-1};
            std::memcpy(dense + j * shape.token_nbytes() + index * sizeof id, &id, sizeof id);
        }
    }
}

/// Calls write(rows of the dense tokens [first, first + count), count <= 8) for a held source, group by group.
template <typename Write>
void unpack_tokens(const RoutingSource& source, std::uint64_t first, std::uint64_t count, const RoutingShape& shape,
                   std::vector<std::byte>& scratch, Write write) {
    scratch.resize(kGroup * shape.token_nbytes());
    const std::uint64_t begin = source.skipped + first;
    for (std::uint64_t at = begin; at < begin + count;) {
        const std::uint64_t group = at / kGroup;
        const std::uint64_t lane = at % kGroup;
        const std::uint64_t some = std::min(kGroup - lane, begin + count - at);
        with_bits(shape.bits, [&](auto bits) {
            unpack_group<bits()>(scratch.data(), source.data + group * shape.group_nbytes(),
                                 source.validity + group * shape.layers, shape);
        });
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
    bool all_held() const {
        return std::all_of(begin(), end(), [](const Piece& piece) { return piece.source->held; });
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
template <unsigned Bits>
void merge(std::byte* ids, std::byte* validity, const Piece& piece, const RoutingShape& shape) {
    const std::byte* held = piece.source->data;
    const std::byte* held_set = piece.source->validity;
    const std::uint64_t begin = piece.source->skipped + piece.first;
    std::uint64_t lane = piece.lane;
    for (std::uint64_t at = begin; at < begin + piece.count;) {
        const std::uint64_t group = at / kGroup;
        const std::uint64_t from = at % kGroup;
        const std::uint64_t some = std::min(kGroup - from, begin + piece.count - at);
        // all 8 of 8 bits would shift by the whole width of the word
        const auto mask = static_cast<Word<Bits>>((static_cast<Wide>(1) << some * Bits) - 1);
        const std::byte* source = held + group * shape.group_nbytes();
        for (std::uint64_t index = 0; index < shape.ids(); ++index) {
            const auto word = static_cast<Word<Bits>>(load_word<Bits>(source + index * Bits) >> from * Bits & mask);
            std::byte* to = ids + index * Bits;
            store_word<Bits>(to, static_cast<Word<Bits>>(load_word<Bits>(to) | word << lane * Bits));
        }
        for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
            const std::byte set = held_set[group * shape.layers + layer] & lanes(from, some);
            validity[layer] |= set >> static_cast<int>(from) << static_cast<int>(lane);
        }
        lane += some;
        at += some;
    }
}

/// Groups of a packed field, one after another.
template <unsigned Bits>
class PackedWriter {
  public:
    PackedWriter(const PackedRouting& field, const RoutingShape& shape, const Part& part)
        : shape_(shape),
          ids_(field.ids + part.first * shape.group_nbytes(), part.streaming),
          validity_(field.validity + part.first * shape.layers, part.streaming),
          unset_(shape.token_nbytes(), std::byte{0xff}),
          merged_(shape.group_nbytes() + shape.layers) {}

    void append(const Pieces& pieces) {
        if (pieces.empty()) {
            ids_.fill(0, shape_.group_nbytes());
            validity_.fill(0, shape_.layers);
        } else if (!pieces.any_held()) {
            append_dense(ids_, validity_, pieces);
        } else if (pieces.begin()->count == kGroup) {
            append_held(*pieces.begin());
        } else {
            append_merged(pieces);
        }
    }

    void finish() {
        ids_.finish();
        validity_.finish();
    }

  private:
    void append_dense(Sink& ids, Sink& validity, const Pieces& pieces) {
        Rows rows;
        rows.fill(unset_.data());
        for (const Piece& piece : pieces) {
            if (piece.source->held) continue;
            for (std::uint64_t t = 0; t < piece.count; ++t) {
                rows[piece.lane + t] = piece.source->data + (piece.first + t) * shape_.token_nbytes();
            }
        }
        pack_ids<Bits>(ids, rows, shape_);
        pack_validity(validity, rows, shape_);
    }

    /// 8 held tokens: one group of their source, or the end of one and the begin of the next.
    void append_held(const Piece& piece) {
        const RoutingSource& source = *piece.source;
        const std::uint64_t first = source.skipped + piece.first;
        const std::uint64_t group = first / kGroup;
        const std::byte* ids = source.data + group * shape_.group_nbytes();
        const std::byte* set = source.validity + group * shape_.layers;
        const auto skipped = static_cast<unsigned>(first % kGroup);
        if (skipped == 0) {
            ids_.copy(ids, shape_.group_nbytes());
            validity_.copy(set, shape_.layers);
            return;
        }
        const unsigned down = skipped * Bits;
        const unsigned up = kGroup * Bits - down;
        for (std::uint64_t index = 0; index < shape_.ids(); ++index) {
            const Word<Bits> here = load_word<Bits>(ids + index * Bits);
            const Word<Bits> next = load_word<Bits>(ids + shape_.group_nbytes() + index * Bits);
            store_word<Bits>(ids_.room(Bits), here >> down | next << up);
            ids_.commit(Bits);
        }
        for (std::uint64_t layer = 0; layer < shape_.layers; ++layer) {
            const auto here = std::to_integer<unsigned>(set[layer]);
            const auto next = std::to_integer<unsigned>(set[shape_.layers + layer]);
            *validity_.room(1) = static_cast<std::byte>(here >> skipped | next << (kGroup - skipped));
            validity_.commit(1);
        }
    }

    void append_merged(const Pieces& pieces) {
        std::byte* set = merged_.data() + shape_.group_nbytes();
        if (pieces.all_held()) {
            std::memset(merged_.data(), 0, merged_.size());
        } else {
            Sink ids(merged_.data(), false);
            Sink validity(set, false);
            append_dense(ids, validity, pieces);
        }
        for (const Piece& piece : pieces) {
            if (piece.source->held) merge<Bits>(merged_.data(), set, piece, shape_);
        }
        ids_.copy(merged_.data(), shape_.group_nbytes());
        validity_.copy(set, shape_.layers);
    }

    RoutingShape shape_;
    Sink ids_;
    Sink validity_;
    std::vector<std::byte> unset_;   ///< ids of a token without routing
    std::vector<std::byte> merged_;  ///< one group
};

}  // namespace

std::uint64_t held_nbytes(const RoutingShape& shape, std::uint64_t tokens) {
    return (tokens + kGroup - 1) / kGroup * (shape.group_nbytes() + shape.layers);
}

RoutingSource held_source(const std::byte* held, std::uint64_t skipped, std::uint64_t tokens,
                          const RoutingShape& shape) {
    const std::uint64_t groups = (skipped + tokens + kGroup - 1) / kGroup;
    return {held, tokens, true, held + groups * shape.group_nbytes(), skipped};
}

RoutingSource part_of(const RoutingSource& source, std::uint64_t first, std::uint64_t count, const RoutingShape& shape) {
    RoutingSource part = source;
    part.tokens = source.tokens > first ? std::min(count, source.tokens - first) : 0;
    if (part.tokens == 0) return part;
    if (!source.held) {
        part.data += first * shape.token_nbytes();
        return part;
    }
    const std::uint64_t at = source.skipped + first;
    part.data += at / kGroup * shape.group_nbytes();
    part.validity += at / kGroup * shape.layers;
    part.skipped = at % kGroup;
    return part;
}

void pack_routing(std::byte* held, const std::byte* dense, std::uint64_t tokens, const RoutingShape& shape) {
    const std::vector<Span> spans{{0, tokens, 0}};
    const std::vector<RoutingSource> sources{{dense, tokens, false}};
    const std::uint64_t groups = (tokens + kGroup - 1) / kGroup;
    fill_packed_routing({held, held + groups * shape.group_nbytes()}, shape, sources, spans, {0, groups, false});
}

void unpack_routing(std::byte* dense, const std::byte* held, std::uint64_t tokens, const RoutingShape& shape) {
    fill_dense_routing(dense, shape, {held_source(held, 0, tokens, shape)}, {{0, tokens, 0}}, {0, tokens, false});
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
                unpack_tokens(source, first, given, shape, scratch,
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
    with_bits(shape.bits, [&](auto bits) {
        PackedWriter<bits()> writer(field, shape, part);
        std::size_t i = span_after(spans, part.first * kGroup);
        for (std::uint64_t group = part.first; group < part.last; ++group) {
            writer.append(pieces_of(group * kGroup, i, spans, sources));
        }
        writer.finish();
    });
}

void fill_offsets(std::byte* destination, const std::vector<Segment>& segments, std::uint64_t rows) {
    std::size_t i = 0;
    std::int32_t offset = 0;
    for (std::uint64_t row = 0; row <= rows; ++row) {
        std::memcpy(destination + row * sizeof offset, &offset, sizeof offset);
        for (; i < segments.size() && segments[i].row == row; ++i) {
            offset += static_cast<std::int32_t>(segments[i].length);
        }
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
