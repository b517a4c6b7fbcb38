// Owner and consumers as threads on one mapping: a thread sanitizer sees no race through two mappings of one page.
//
// Nothing but the words of the protocol orders the threads: consumers find publications by looking at generations, so
// a payload that is read before its publication is visible, or written before its last reader is done, is a race.
// SEED_* compile in a deliberate fault, which the sanitizer has to report.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "../atomics.h"
#include "../bytes.h"
#include "../slots.h"
#include "checks.h"

namespace {

using namespace shmstage;

constexpr std::uint32_t kSlots = 3;
constexpr std::uint32_t kConsumers = 2;
constexpr std::uint32_t kWriters = 2;
constexpr std::size_t kWords = 64;
constexpr std::uint32_t kLayout = 7;
constexpr std::uint64_t kEpoch = 3;
constexpr std::int64_t kWaitNs = 1'000'000'000;
constexpr std::uint64_t kEach = 4000;  // generations per writer

struct Pool {
    Slots slots{};
    // Of their own, on the heap: an address sanitizer knows where each ends.
    std::vector<std::unique_ptr<std::uint64_t[]>> payloads;
    std::vector<std::unique_ptr<std::uint64_t>> late;
    std::atomic<std::uint32_t> writing{kWriters};
};

std::uint64_t content(std::uint32_t slot, std::uint64_t generation) { return generation << 8 | slot; }

void fill(Pool& pool, std::uint32_t slot, std::uint64_t generation) {
    std::array<std::uint64_t, kWords + 1> words{};
    words.fill(content(slot, generation));
#ifdef SEED_OVERRUN
    const std::size_t count = kWords + (generation == 200 ? 1 : 0);
#else
    const std::size_t count = kWords;
#endif
    copy_bytes(pool.payloads[slot].get(), words.data(), count * sizeof words[0]);
    *pool.late[slot] = 0;
}

void write(Pool& pool, std::uint32_t number) {
    Dice dice(number + 1);
    for (std::uint64_t done = 0; done < kEach;) {
        const std::int32_t claimed = claim(pool.slots, 0, kSlots, kWaitNs);
        if (claimed < 0) continue;
        const auto slot = static_cast<std::uint32_t>(claimed);
        const std::uint64_t odd = load_relaxed(pool.slots.slots[slot].generation);
        CHECK((odd & 1) == 1);
        fill(pool, slot, odd + 1);
        ++done;
        if (dice.below(16) == 0) {
            CHECK(discard(pool.slots, slot, odd));
            continue;
        }
        const std::uint64_t mask = dice.below(16) == 0 ? 0 : 1 + dice.below((1U << kConsumers) - 1);
        CHECK(publish(pool.slots, slot, odd, kLayout, mask, done, number) == odd + 1);
        // Published for nobody: taken back, unless another thread has claimed it since.
        if (mask == 0 && dice.below(2) == 0) static_cast<void>(discard(pool.slots, slot, odd + 1));
    }
    pool.writing.fetch_sub(1, std::memory_order_relaxed);
}

void read(Pool& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t consumer) {
    const std::uint64_t* words = pool.payloads[slot].get();
    for (std::size_t i = 0; i < kWords; ++i) CHECK(words[i] == content(slot, generation));
    std::uint32_t& version = pool.slots.slots[slot].late_versions[0];
    if (consumer == 0) {
        *pool.late[slot] = generation;
        store_release(version, load_relaxed(version) + 1);
    } else if (load_acquire(version) != 0) {
        CHECK(*pool.late[slot] == generation);
    }
}

/// Reads what is published in a slot, if it has not yet; the generation it looked at.
std::uint64_t consume(Pool& pool, std::uint32_t slot, std::uint32_t consumer) {
    const std::uint64_t generation = load_relaxed(pool.slots.slots[slot].generation);
    LeaseState state = lease_state(pool.slots, slot, generation, kLayout, consumer, kEpoch);
#ifdef SEED_RACE
    // reads what it has no lease of
    if (state == LeaseState::kNotTargeted && generation % 64 == 0) {
        volatile std::uint64_t seen = pool.payloads[slot][0];
        static_cast<void>(seen);
    }
#endif
    if (state != LeaseState::kValid) return generation;
#ifdef SEED_EARLY_END
    CHECK(end_lease(pool.slots, slot, generation, consumer));
    volatile std::uint64_t seen = pool.payloads[slot][kWords - 1];
    static_cast<void>(seen);
    return generation;
#endif
    read(pool, slot, generation, consumer);
    CHECK(lease_state(pool.slots, slot, generation, kLayout, consumer, kEpoch) == LeaseState::kValid);
    CHECK(end_lease(pool.slots, slot, generation, consumer));
    CHECK(end_lease(pool.slots, slot, generation, consumer));  // twice is harmless
    return generation;
}

void consume_all(Pool& pool, std::uint32_t consumer) {
    while (pool.writing.load(std::memory_order_relaxed) != 0) {
        for (std::uint32_t slot = 0; slot < kSlots; ++slot) consume(pool, slot, consumer);
        std::this_thread::yield();
    }
}

/// Ends leases of generations long over, again and again, beside everything else; looks and wakes like a tool would.
void disturb(Pool& pool) {
    while (pool.writing.load(std::memory_order_relaxed) != 0) {
        for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
            const std::uint64_t generation = load_relaxed(pool.slots.slots[slot].generation) & ~std::uint64_t{1};
            if (generation >= 4) CHECK(end_lease(pool.slots, slot, generation - 2, 0));
            CHECK(!end_lease(pool.slots, slot, generation + 1024 * 1024, 1));  // believed it would free what is to come
            static_cast<void>(is_free(pool.slots, slot));
        }
        wake_all(pool.slots);
        std::this_thread::yield();
    }
}

}  // namespace

int main() {
    const std::size_t nbytes = sizeof(PoolHeader) + kSlots * sizeof(SlotHeader);
    void* mapping = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping != MAP_FAILED);
    Pool pool;
    pool.slots = {static_cast<PoolHeader*>(mapping), reinterpret_cast<SlotHeader*>(static_cast<PoolHeader*>(mapping) + 1),
                  kSlots, kConsumers};
    pool.slots.pool->epoch = kEpoch;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        pool.payloads.push_back(std::make_unique<std::uint64_t[]>(kWords));
        pool.late.push_back(std::make_unique<std::uint64_t>(0));
    }
    std::vector<std::thread> threads;
    for (std::uint32_t number = 0; number < kWriters; ++number) threads.emplace_back(write, std::ref(pool), number);
    for (std::uint32_t consumer = 0; consumer < kConsumers; ++consumer) {
        threads.emplace_back(consume_all, std::ref(pool), consumer);
    }
    threads.emplace_back(disturb, std::ref(pool));
    for (std::thread& thread : threads) thread.join();
    std::uint64_t generations = 0;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        for (std::uint32_t consumer = 0; consumer < kConsumers; ++consumer) consume(pool, slot, consumer);
        CHECK(is_free(pool.slots, slot));
        generations += pool.slots.slots[slot].generation / 2;
    }
    CHECK(generations >= kWriters * kEach);
    CHECK(pool.slots.pool->waiter_count == 0);
#ifdef SEED_USE_AFTER_FREE
    const std::uint64_t* freed = pool.payloads[0].get();
    pool.payloads.clear();
    CHECK(freed[0] != 1);
#endif
    CHECK(munmap(mapping, nbytes) == 0);
    std::printf("%llu generations\n", static_cast<unsigned long long>(generations));
    return 0;
}
