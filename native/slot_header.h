// The bytes of a pool that both sides read and write. Payloads follow, page-aligned, after the slot headers.
//
//   pool file
//   +------------+------------------------------+----------+----------+-----
//   | PoolHeader | SlotHeader x slot_count, pad | payload0 | payload1 | ...
//   | 4096 bytes | 320 bytes each, to a page    | slot_stride bytes each
//   +------------+------------------------------+----------+----------+-----
//
// Every word that two processes touch is naturally aligned and goes through atomics.h. No pointers: the two
// sides map the file at different addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shmstage {

inline constexpr char kMagic[8] = {'S', 'H', 'M', 'S', 'T', 'A', 'G', 'E'};
inline constexpr std::uint32_t kAbiVersion = 2;
inline constexpr std::uint32_t kMaxConsumers = 24;
inline constexpr std::uint32_t kMaxLateFields = 16;
inline constexpr std::size_t kPageNbytes = 4096;

//   offset  size  PoolHeader                   written by
//        0     8  magic                        owner, once
//        8     4  abi_version                  owner, once
//       12     4  ready                        owner, last of all (release); 0 = half made
//       16     8  epoch                        owner, once
//       24     8  pool_nbytes                  owner, once
//       32     8  payload_offset               owner, once
//       40     8  slot_stride                  owner, once
//       48     4  slot_count (with aux)        owner, once
//       52     4  aux_slot_count               owner, once
//       56     4  consumer_count               owner, once
//       60     4  payload_shift                owner, once
//       64     8  owner_start_ticks            owner, once
//       72     4  owner_pid                    owner, once
//       76     4  backing                      owner, once; see Backing
//       80     8  heartbeat_ns                 owner
//       88     8  owner_namespace              owner, once; equal words mean the same thing by a pid, 0 = unknown
//      128     4  free_sequence                both; futex word, +1 whenever a slot may have become free
//      132     4  waiter_count                 owner's threads; 0 = ending a lease needs no system call
//      192    64  counters[8]                  see Counter
//      256   128  run_id, NUL padded           owner, once
//      384   128  lock_path, NUL padded        owner, before anything that takes long
//      512   256  last_error, NUL padded       owner
//      768    96  consumer_pids[24]            the consumer that attached
//      896     8  latest                       owner; the newest publication for readers' cells, 0 = none: cells.h
//      960   192  cell_owners[24]              who claims a free cell (0); cleared by it, or by the owner once it is dead
//     1152   192  cell_words[24]               the cell's owner: the publication it reads, 0 = none
struct PoolHeader {
    char magic[8];
    std::uint32_t abi_version;
    std::uint32_t ready;
    std::uint64_t epoch;
    std::uint64_t pool_nbytes;
    std::uint64_t payload_offset;
    std::uint64_t slot_stride;
    std::uint32_t slot_count;
    std::uint32_t aux_slot_count;
    std::uint32_t consumer_count;
    std::uint32_t payload_shift;
    std::uint64_t owner_start_ticks;
    std::uint32_t owner_pid;
    std::uint32_t backing;
    std::uint64_t heartbeat_ns;
    std::uint64_t owner_namespace;
    char pad1[32];
    std::uint32_t free_sequence;
    std::uint32_t waiter_count;
    char pad2[56];
    std::uint64_t counters[8];
    char run_id[128];
    char lock_path[128];
    char last_error[256];
    std::uint32_t consumer_pids[kMaxConsumers];
    char pad3[32];
    std::uint64_t latest;
    char pad4[56];
    std::uint64_t cell_owners[kMaxConsumers];
    std::uint64_t cell_words[kMaxConsumers];
    char pad5[kPageNbytes - 1344];
};

static_assert(offsetof(PoolHeader, magic) == 0);
static_assert(offsetof(PoolHeader, abi_version) == 8);
static_assert(offsetof(PoolHeader, ready) == 12);
static_assert(offsetof(PoolHeader, epoch) == 16);
static_assert(offsetof(PoolHeader, pool_nbytes) == 24);
static_assert(offsetof(PoolHeader, payload_offset) == 32);
static_assert(offsetof(PoolHeader, slot_stride) == 40);
static_assert(offsetof(PoolHeader, slot_count) == 48);
static_assert(offsetof(PoolHeader, aux_slot_count) == 52);
static_assert(offsetof(PoolHeader, consumer_count) == 56);
static_assert(offsetof(PoolHeader, payload_shift) == 60);
static_assert(offsetof(PoolHeader, owner_start_ticks) == 64);
static_assert(offsetof(PoolHeader, owner_pid) == 72);
static_assert(offsetof(PoolHeader, backing) == 76);
static_assert(offsetof(PoolHeader, heartbeat_ns) == 80);
static_assert(offsetof(PoolHeader, owner_namespace) == 88);
static_assert(offsetof(PoolHeader, free_sequence) == 128);
static_assert(offsetof(PoolHeader, waiter_count) == 132);
static_assert(offsetof(PoolHeader, counters) == 192);
static_assert(offsetof(PoolHeader, run_id) == 256);
static_assert(offsetof(PoolHeader, lock_path) == 384);
static_assert(offsetof(PoolHeader, last_error) == 512);
static_assert(offsetof(PoolHeader, consumer_pids) == 768);
static_assert(offsetof(PoolHeader, latest) == 896);
static_assert(offsetof(PoolHeader, cell_owners) == 960);
static_assert(offsetof(PoolHeader, cell_words) == 1152);
static_assert(sizeof(PoolHeader) == kPageNbytes);

/// How the pool's memory was asked for. Bits.
enum Backing : std::uint32_t { kHugePages = 1, kInterleaved = 2 };

enum Counter : std::size_t { kPublished, kEndedLeases, kWithdrawn, kAbandoned, kWaits, kWaitedNs };

//   offset  size  SlotHeader                   written by
//        0     8  generation                   owner; odd = being written, even = published, only ever forward
//        8     8  target_mask                  owner, before the generation; bit c = consumer c must end its lease
//       16     4  layout_id                    owner, before the generation
//       20     4  index (of the micro-batch)   owner, before the generation; for messages only
//       24     8  step                         owner, before the generation; for messages only
//       32     8  since_ns                     owner; CLOCK_MONOTONIC of the last claim, publication or discard;
//                                              for people who look, nothing is decided by it
//       64   192  ended[24]                    consumer c alone (the owner once c is proven dead): the last
//                                              generation whose lease it has ended; only ever forward
//      256    64  late_versions[16]            who writes late field i, after its bytes (release)
struct SlotHeader {
    std::uint64_t generation;
    std::uint64_t target_mask;
    std::uint32_t layout_id;
    std::uint32_t index;
    std::uint64_t step;
    std::uint64_t since_ns;
    char pad0[24];
    std::uint64_t ended[kMaxConsumers];
    std::uint32_t late_versions[kMaxLateFields];
};

static_assert(offsetof(SlotHeader, generation) == 0);
static_assert(offsetof(SlotHeader, target_mask) == 8);
static_assert(offsetof(SlotHeader, layout_id) == 16);
static_assert(offsetof(SlotHeader, index) == 20);
static_assert(offsetof(SlotHeader, step) == 24);
static_assert(offsetof(SlotHeader, since_ns) == 32);
static_assert(offsetof(SlotHeader, ended) == 64);
static_assert(offsetof(SlotHeader, late_versions) == 256);
static_assert(sizeof(SlotHeader) == 320);

}  // namespace shmstage
