#include "slots.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

#include "atomics.h"

namespace shmstage {
namespace {

// Not FUTEX_PRIVATE_FLAG: the waiter and the waker are different processes.
long futex_wait(const std::uint32_t& word, std::uint32_t expected, const timespec& timeout) {
    return syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake(const std::uint32_t& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void stamp(SlotHeader& header) {
    store_relaxed(header.since_ns, static_cast<std::uint64_t>(monotonic_ns()));
}

bool is_free_at(const Slots& pool, std::uint32_t slot, std::uint64_t generation) {
    if ((generation & 1) != 0) return false;
    const SlotHeader& header = pool.slots[slot];
    const std::uint64_t mask = load_acquire(header.target_mask);
    for (std::uint32_t consumer = 0; consumer < kMaxConsumers; ++consumer) {
        // acquire: the consumer's reads of the payload are over before our writes begin.
        if (((mask >> consumer) & 1) != 0 && load_acquire(header.ended[consumer]) < generation) return false;
    }
    return true;
}

std::int32_t try_claim(const Slots& pool, std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t slot = first; slot < last; ++slot) {
        SlotHeader& header = pool.slots[slot];
        const std::uint64_t generation = load_acquire(header.generation);
        // The exchange is on the very generation that was judged: another thread of the owner may have taken
        // the slot, and even published it again, in between.
        if (!is_free_at(pool, slot, generation)) continue;
        if (!exchange_if_equal(header.generation, generation, generation + 1)) continue;
        stamp(header);
        for (std::uint32_t& version : header.late_versions) store_relaxed(version, std::uint32_t{0});
        // A reader that sees any byte of what is written from here on must also see the odd generation.
        fence_ordered();
        return static_cast<std::int32_t>(slot);
    }
    return -1;
}

void announce_free(const Slots& pool) {
    add_ordered(pool.pool->free_sequence, std::uint32_t{1});
    // A waiter counts itself before it compares free_sequence, so either it sees our increment or we see it.
    if (load_ordered(pool.pool->waiter_count) != 0) futex_wake(pool.pool->free_sequence);
}

void count(const Slots& pool, Counter which, std::uint64_t value = 1) {
    __atomic_fetch_add(&pool.pool->counters[which], value, __ATOMIC_RELAXED);
}

}  // namespace

bool is_free(const Slots& pool, std::uint32_t slot) {
    return is_free_at(pool, slot, load_acquire(pool.slots[slot].generation));
}

std::int32_t claim(const Slots& pool, std::uint32_t first, std::uint32_t last, std::int64_t timeout_ns) {
    std::int32_t slot = try_claim(pool, first, last);
    if (slot >= 0 || timeout_ns <= 0) return slot;
    const std::int64_t begin_ns = monotonic_ns();
    const std::int64_t deadline_ns = begin_ns + timeout_ns;
    add_ordered(pool.pool->waiter_count, std::uint32_t{1});
    while (true) {
        const std::uint32_t sequence = load_ordered(pool.pool->free_sequence);
        slot = try_claim(pool, first, last);
        const std::int64_t left_ns = deadline_ns - monotonic_ns();
        if (slot >= 0 || left_ns <= 0) break;
        timespec timeout{};
        timeout.tv_sec = static_cast<time_t>(left_ns / 1'000'000'000);
        timeout.tv_nsec = static_cast<long>(left_ns % 1'000'000'000);
        // A signal belongs to Python: give it back the thread.
        if (futex_wait(pool.pool->free_sequence, sequence, timeout) != 0 && errno == EINTR) break;
    }
    add_ordered(pool.pool->waiter_count, ~std::uint32_t{0});
    count(pool, kWaits);
    count(pool, kWaitedNs, static_cast<std::uint64_t>(monotonic_ns() - begin_ns));
    return slot;
}

std::uint64_t publish(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                      std::uint64_t target_mask, std::uint64_t step, std::uint32_t index) {
    SlotHeader& header = pool.slots[slot];
    if ((generation & 1) == 0 || load_acquire(header.generation) != generation) return 0;
    store_relaxed(header.layout_id, layout_id);
    store_relaxed(header.step, step);
    store_relaxed(header.index, index);
    stamp(header);
    // Mask first: who sees the even generation must see whom it is for, else the slot would look free.
    store_release(header.target_mask, target_mask);
    store_release(header.generation, generation + 1);
    count(pool, kPublished);
    // Published for nobody it is free at once, and no lease's end will say so.
    if (target_mask == 0) announce_free(pool);
    return generation + 1;
}

bool discard(const Slots& pool, std::uint32_t slot, std::uint64_t generation) {
    SlotHeader& header = pool.slots[slot];
    const bool published = (generation & 1) == 0;
    if (load_acquire(header.generation) != generation) return false;
    if (published) {
        // Through the odd generation: between mask 0 and the new even one the slot must not look free.
        if (!exchange_if_equal(header.generation, generation, generation + 1)) return false;
        store_release(header.target_mask, std::uint64_t{0});
        store_release(header.generation, generation + 2);
    } else {
        store_release(header.target_mask, std::uint64_t{0});
        if (!exchange_if_equal(header.generation, generation, generation + 1)) return false;
    }
    stamp(header);
    count(pool, published ? kWithdrawn : kAbandoned);
    announce_free(pool);
    return true;
}

LeaseState lease_state(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                       std::uint32_t consumer, std::uint64_t epoch) {
    const SlotHeader& header = pool.slots[slot];
    if (load_acquire(pool.pool->epoch) != epoch) return LeaseState::kOtherEpoch;
    // Orders the caller's payload reads before this load when it checks *after* reading.
    fence_acquire();
    const std::uint64_t current = load_acquire(header.generation);
    if ((generation & 1) != 0 || generation == 0 || generation > current) return LeaseState::kNotPublished;
    const std::uint64_t mask = load_acquire(header.target_mask);
    // acquire, so that the generation below is read after it
    const std::uint32_t published_layout = load_acquire(header.layout_id);
    // The words above belong to `generation` only if it is still the slot's.
    if (load_acquire(header.generation) != generation) return LeaseState::kMovedOn;
    if (published_layout != layout_id) return LeaseState::kOtherLayout;
    if (((mask >> consumer) & 1) == 0) return LeaseState::kNotTargeted;
    if (load_acquire(header.ended[consumer]) >= generation) return LeaseState::kEnded;
    return LeaseState::kValid;
}

bool end_lease(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t consumer) {
    SlotHeader& header = pool.slots[slot];
    if ((generation & 1) != 0 || generation > load_acquire(header.generation)) return false;
    std::uint64_t ended = load_relaxed(header.ended[consumer]);
    // Forward only, also when two threads of the consumer end different generations at once.
    while (ended < generation) {
        if (exchange_if_equal(header.ended[consumer], ended, generation)) {
            count(pool, kEndedLeases);
            announce_free(pool);
            break;
        }
        ended = load_relaxed(header.ended[consumer]);
    }
    return true;
}

void wake_all(const Slots& pool) {
    add_ordered(pool.pool->free_sequence, std::uint32_t{1});
    futex_wake(pool.pool->free_sequence);
}

}  // namespace shmstage
