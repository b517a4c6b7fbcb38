// The owner of a pool and readers of its newest publication, as threads on one mapping.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "../cells.h"
#include "checks.h"

namespace {

using namespace shmstage;

constexpr std::uint32_t kPlaces = 3;
constexpr std::uint32_t kReaders = 2;
constexpr std::size_t kWords = 64;
constexpr std::uint64_t kPublications = 6000;

struct Shared {
    Slots slots{};
    std::array<std::unique_ptr<std::uint64_t[]>, kPlaces> places;
    std::atomic<bool> over{false};
};

std::uint32_t place_of(std::uint64_t word) { return static_cast<std::uint32_t>(word & 0xff); }

/// A place that is neither the newest nor in a cell; kPlaces if there is none.
std::uint32_t free_place(const Shared& shared) {
    const std::uint64_t newest = latest(shared.slots);
    std::array<bool, kPlaces> taken{};
    if (newest != 0) taken[place_of(newest)] = true;
#ifndef SEED_RACE
    for (std::uint32_t index = 0; index < kMaxConsumers; ++index) {
        const Cell found = cell(shared.slots, index);
        if (found.identity != 0 && found.word != 0) taken[place_of(found.word)] = true;
    }
#endif
    for (std::uint32_t place = 0; place < kPlaces; ++place) {
        if (!taken[place]) return place;
    }
    return kPlaces;
}

void publish_all(Shared& shared) {
    for (std::uint64_t number = 1; number <= kPublications;) {
        const std::uint32_t place = free_place(shared);
        if (place == kPlaces) {
            std::this_thread::yield();
            continue;
        }
        const std::uint64_t word = number << 8 | place;
        for (std::size_t i = 0; i < kWords; ++i) shared.places[place][i] = word;
        set_latest(shared.slots, word);
        if (number % 50 == 0) set_latest(shared.slots, 0);  // taken back
        ++number;
    }
    shared.over.store(true, std::memory_order_relaxed);
}

void read_all(Shared& shared, std::uint64_t identity) {
    Dice dice(identity);
    while (!shared.over.load(std::memory_order_relaxed)) {
        const std::int32_t claimed = claim_cell(shared.slots, identity);
        CHECK(claimed >= 0);
        const auto mine = static_cast<std::uint32_t>(claimed);
        for (std::uint64_t take = dice.below(5); take > 0; --take) {
            const std::uint64_t word = take_latest(shared.slots, mine);
            for (std::size_t i = 0; word != 0 && i < kWords; ++i) CHECK(shared.places[place_of(word)][i] == word);
            put_back(shared.slots, mine);
        }
        CHECK(!release_cell(shared.slots, mine, identity + 1000));
        CHECK(release_cell(shared.slots, mine, identity));
    }
}

}  // namespace

int main() {
    const std::size_t nbytes = sizeof(PoolHeader) + kPlaces * sizeof(SlotHeader);
    void* mapping = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping != MAP_FAILED);
    Shared shared;
    shared.slots = {static_cast<PoolHeader*>(mapping),
                    reinterpret_cast<SlotHeader*>(static_cast<PoolHeader*>(mapping) + 1), kPlaces, 1};
    for (auto& place : shared.places) place = std::make_unique<std::uint64_t[]>(kWords);
    std::vector<std::thread> threads;
    threads.emplace_back(publish_all, std::ref(shared));
    for (std::uint64_t reader = 0; reader < kReaders; ++reader) {
        threads.emplace_back(read_all, std::ref(shared), reader + 1);
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(munmap(mapping, nbytes) == 0);
    std::printf("%llu publications\n", static_cast<unsigned long long>(kPublications));
    return 0;
}
