// The life of a slot, on mapped headers. No policy: which slots, how long and what an answer means is Python's.
#pragma once

#include <cstdint>

#include "slot_header.h"

namespace shmstage {

/// Mapped headers of one pool. Owns nothing; the bounds were checked by whoever made it.
struct Slots {
    PoolHeader* pool;            ///< first page of the mapping
    SlotHeader* slots;           ///< slot_count headers behind it
    std::uint32_t slot_count;    ///< as checked against the mapping's size, never re-read from shared memory
    std::uint32_t consumer_count;
};

enum class LeaseState : int {
    kValid = 0,
    kMovedOn = 1,         ///< the slot is at a later generation
    kNotPublished = 2,    ///< the handle names a generation that was never published
    kOtherLayout = 3,     ///< the handle names another layout than the slot was published with
    kNotTargeted = 4,     ///< this consumer was not meant to read it
    kEnded = 5,           ///< this consumer has already ended this lease
    kOtherEpoch = 6,      ///< the header no longer says the epoch that was attached to
};

/// True when no consumer may still read the slot and nobody writes it.
bool is_free(const Slots& pool, std::uint32_t slot);

/// Takes the first free slot of [first, last) for writing (its generation becomes odd), or returns -1 after
/// `timeout_ns`, or earlier when a signal arrived. Blocks in a futex; call without the GIL.
std::int32_t claim(const Slots& pool, std::uint32_t first, std::uint32_t last, std::int64_t timeout_ns);

/// Makes a claimed slot visible; returns the new even generation, 0 if it is not being written at `generation`.
std::uint64_t publish(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                      std::uint64_t target_mask, std::uint64_t step, std::uint32_t index);

/// Moves a slot at exactly `generation` (odd: its writer gave up; even: published, withdrawn) on to the next
/// even generation with nobody targeted. False if the slot is elsewhere.
bool discard(const Slots& pool, std::uint32_t slot, std::uint64_t generation);

LeaseState lease_state(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                       std::uint32_t consumer, std::uint64_t epoch);

/// Ends `consumer`'s lease of `generation` and wakes the owner. Twice is harmless. False if `generation` was
/// never published: believing it would free generations to come.
bool end_lease(const Slots& pool, std::uint32_t slot, std::uint64_t generation, std::uint32_t consumer);

/// Wakes every waiter, for example because it should look at its stop condition now.
void wake_all(const Slots& pool);

}  // namespace shmstage
