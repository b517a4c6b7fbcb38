// Copies and fills against a plain reference, in buffers that end where they end.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "../bytes.h"
#include "../fill.h"
#include "../guarded_copy.h"
#include "checks.h"

namespace {

using namespace shmstage;

std::vector<Segment> random_segments(Dice& dice, std::uint64_t rows, std::uint64_t tokens) {
    std::vector<Segment> segments;
    for (std::uint64_t row = 0; row < rows; ++row) {
        std::uint64_t at = dice.below(tokens + 1);
        while (at < tokens && dice.below(4) != 0) {
            const std::uint64_t length = dice.below(tokens - at + 1);
            segments.push_back({row, at, length});
            at += length + dice.below(3);
        }
    }
    return segments;
}

/// All positions, in up to three parts, each through the cache or past it.
std::vector<Part> random_parts(Dice& dice, std::uint64_t positions) {
    std::uint64_t a = dice.below(positions + 1);
    std::uint64_t b = dice.below(positions + 1);
    if (a > b) std::swap(a, b);
    return {{0, a, dice.below(2) == 0}, {a, b, dice.below(2) == 0}, {b, positions, dice.below(2) == 0}};
}

std::int32_t int32_at(const std::vector<std::byte>& bytes, std::uint64_t index) {
    std::int32_t value = 0;
    std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
    return value;
}

void check_ids_and_positions(Dice& dice, const std::vector<Segment>& segments, std::uint64_t rows,
                             std::uint64_t tokens) {
    std::vector<std::byte> ids(rows * tokens * sizeof(std::int32_t));
    std::vector<std::byte> positions(ids.size());
    const std::vector<Span> spans = padded_spans(segments, tokens);
    for (const Part& part : random_parts(dice, rows * tokens)) {
        fill_segment_ids(ids.data(), spans, part);
        fill_segment_positions(positions.data(), spans, part);
    }
    std::vector<std::int32_t> want_ids(rows * tokens, 0);
    std::vector<std::int32_t> want_positions(rows * tokens, 0);
    std::int32_t number = 0;
    std::uint64_t row = 0;
    for (const Segment& segment : segments) {
        number = segment.row == row ? number + 1 : 1;
        row = segment.row;
        for (std::uint64_t t = 0; t < segment.length; ++t) {
            want_ids[row * tokens + segment.start + t] = number;
            want_positions[row * tokens + segment.start + t] = static_cast<std::int32_t>(t);
        }
    }
    for (std::uint64_t i = 0; i < rows * tokens; ++i) {
        CHECK(int32_at(ids, i) == want_ids[i]);
        CHECK(int32_at(positions, i) == want_positions[i]);
    }
}

void check_spans(Dice& dice, const std::vector<Segment>& segments, std::uint64_t rows, std::uint64_t tokens) {
    const std::uint64_t token_nbytes = 1 + dice.below(9);
    std::vector<std::byte> want(rows * tokens * token_nbytes, std::byte{0xff});
    std::vector<std::vector<std::byte>> held;
    SpanField field{nullptr, token_nbytes, 0xff, {}};
    for (const Segment& segment : segments) {
        const std::uint64_t given = segment.length - (segment.length != 0 ? dice.below(2) : 0);
        std::vector<std::byte> source(given * token_nbytes);
        for (std::byte& byte : source) byte = static_cast<std::byte>(dice.below(256));
        if (!source.empty()) {
            std::memcpy(want.data() + (segment.row * tokens + segment.start) * token_nbytes, source.data(), source.size());
        }
        held.push_back(std::move(source));
        field.sources.push_back({held.back().data(), given});
    }
#ifdef SEED_OVERRUN
    std::vector<std::byte> got(want.size() - 1);
#else
    std::vector<std::byte> got(want.size());
#endif
    field.destination = got.data();
    const std::vector<Span> spans = padded_spans(segments, tokens);
    for (const Part& part : random_parts(dice, rows * tokens)) fill_spans(field, spans, part);
    CHECK(got == want);
}

void check_refusals() {
    const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    CHECK(segments_fault({{2, 0, 1}}, 2, 4) != nullptr);
    CHECK(segments_fault({{1, 0, 1}, {0, 0, 1}}, 2, 4) != nullptr);
    CHECK(segments_fault({{0, 0, 3}, {0, 2, 1}}, 2, 4) != nullptr);
    CHECK(segments_fault({{0, 3, most}}, 2, 4) != nullptr);
    CHECK(segments_fault({{0, most, 2}}, 2, 4) != nullptr);
    CHECK(segments_fault({{0, 0, 4}, {1, 4, 0}}, 2, 4) == nullptr);
}

void check_copies() {
    for (std::size_t nbytes : {0, 1, 7, 63, 64, 65, 4096, 100003}) {
        std::vector<std::byte> from(nbytes, std::byte{0x5a});
        std::vector<std::byte> to(nbytes);
        std::vector<std::byte> guarded(nbytes);
        copy_bytes(to.data(), from.data(), nbytes);
        CHECK(copy_guarded(guarded.data(), from.data(), nbytes));
        CHECK(to == from && guarded == from);
    }
}

/// A peer shrinks the file under the mapping: the copy ends in false, here and not in SIGBUS.
void check_shrunk_file() {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const int file = memfd_create("shrunk", 0);
    CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(2 * page)) == 0);
    void* mapping = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(mapping != MAP_FAILED);
    const int populated = populate(mapping, 2 * page, true);
    CHECK(populated == 0 || populated == EINVAL);  // a kernel before 5.14
    advise_huge_pages(mapping, 2 * page);
    std::vector<std::byte> to(2 * page);
    CHECK(copy_guarded(to.data(), mapping, to.size()));
    CHECK(ftruncate(file, static_cast<off_t>(page)) == 0);
    CHECK(!copy_guarded(to.data(), mapping, to.size()));
    CHECK(!copy_guarded(mapping, to.data(), to.size()));
    CHECK(copy_guarded(to.data(), mapping, page));
    CHECK(munmap(mapping, 2 * page) == 0);
    CHECK(close(file) == 0);
}

}  // namespace

int main(int argc, char**) {
    Dice dice(1);
    for (int round = 0; round < 400; ++round) {
        const std::uint64_t rows = 1 + dice.below(4);
        const std::uint64_t tokens = 1 + dice.below(40);
        const std::vector<Segment> segments = random_segments(dice, rows, tokens);
        CHECK(segments_fault(segments, rows, tokens) == nullptr);
        check_ids_and_positions(dice, segments, rows, tokens);
        check_spans(dice, segments, rows, tokens);
    }
    check_refusals();
    check_copies();
    check_shrunk_file();
#ifdef SEED_OVERFLOW
    CHECK(std::numeric_limits<int>::max() + argc != 0);
#elif defined(SEED_SHIFT)
    CHECK(1 << (31 + argc) != 5);
#elif defined(SEED_MISALIGNED)
    std::vector<std::byte> bytes(16);
    CHECK(*reinterpret_cast<const std::int32_t*>(bytes.data() + argc) == 0);
#elif defined(SEED_USE_AFTER_FREE)
    auto* freed = new std::vector<Segment>(random_segments(dice, 3, 30));
    const std::vector<Segment>& segments = *freed;
    delete freed;
    CHECK(segments_fault(segments, 3, 30) == nullptr);
#endif
    std::printf("%d rounds\n", 400 * argc);
    return 0;
}
