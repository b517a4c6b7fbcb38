// Runs calls of the slot protocol as coroutines of one thread, one access to shared memory at a time. For tests.
#include "atomics.h"
#include "cells.h"
#include "slots.h"

#include <linux/futex.h>
#include <ucontext.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstring>
#include <ctime>

namespace {

using shmstage::Access;

constexpr int kActors = 8;
constexpr std::uint32_t kSlots = 4;
constexpr std::size_t kStackNbytes = 64 * 1024;
constexpr std::uint64_t kDone = ~std::uint64_t{0};

struct Actor {
    std::array<char, kStackNbytes> stack;
    ucontext_t context;
    std::uint64_t pending = kDone;  ///< offset of the word << 8 | Access; kDone when no call is on its way
    int op = 0;
    std::array<std::uint64_t, 4> arguments{};
    std::uint64_t result = 0;
    int error = 0;      ///< what the sleep in the kernel ends with
    bool woken = false;
};

struct alignas(64) Memory {
    shmstage::PoolHeader pool;
    shmstage::SlotHeader slots[kSlots];
};

Memory memory;
shmstage::Slots slots{&memory.pool, memory.slots, 0, 0};
std::uint32_t cell_count = 0;
std::array<Actor, kActors> actors;
ucontext_t test;
Actor* current = nullptr;

/// Words that only people look at, or that one call writes for itself, are no steps of the protocol.
bool is_step(std::size_t offset) {
    using shmstage::PoolHeader;
    using shmstage::SlotHeader;
    if (offset < sizeof(PoolHeader)) {
        const auto within = [&](std::size_t begin) { return offset >= begin && offset < begin + 8 * cell_count; };
        return offset == offsetof(PoolHeader, free_sequence) || offset == offsetof(PoolHeader, waiter_count) ||
               offset == offsetof(PoolHeader, latest) || within(offsetof(PoolHeader, cell_owners)) ||
               within(offsetof(PoolHeader, cell_words));
    }
    const std::size_t in_slot = (offset - sizeof(PoolHeader)) % sizeof(SlotHeader);
    return in_slot == offsetof(SlotHeader, generation) || in_slot == offsetof(SlotHeader, target_mask) ||
           (in_slot >= offsetof(SlotHeader, ended) && in_slot < offsetof(SlotHeader, late_versions));
}

void yield(std::size_t offset, Access access) {
    Actor* const me = current;
    me->pending = offset << 8 | static_cast<std::uint64_t>(access);
    swapcontext(&me->context, &test);
}

std::uint64_t call(const Actor& actor) {
    const auto& a = actor.arguments;
    const auto word = [&](int i) { return static_cast<std::uint32_t>(a[static_cast<std::size_t>(i)]); };
    switch (actor.op) {
        case 0: return static_cast<std::uint64_t>(shmstage::claim(slots, word(0), word(1), 1'000'000'000));
        case 1: return shmstage::publish(slots, word(0), a[1], 7, a[2], 0, 0);
        case 2: return shmstage::discard(slots, word(0), a[1]);
        case 3: return static_cast<std::uint64_t>(shmstage::lease_state(slots, word(0), a[1], 7, word(2), 0));
        case 4: return shmstage::end_lease(slots, word(0), a[1], word(2));
        case 5: return shmstage::latest(slots);
        case 6: shmstage::set_latest(slots, a[0]); return 0;
        case 7: return static_cast<std::uint64_t>(shmstage::claim_cell(slots, a[0]));
        case 8: return shmstage::release_cell(slots, word(0), a[1]);
        case 9: return shmstage::take_latest(slots, word(0));
        case 10: shmstage::put_back(slots, word(0)); return 0;
        default: {
            const shmstage::Cell found = shmstage::cell(slots, word(0));
            return found.identity << 32 | found.word;
        }
    }
}

void run() {
    Actor* const me = current;
    me->result = call(*me);
    me->pending = kDone;
    // Never returns: the context is made anew for the next call.
    swapcontext(&me->context, &test);
}

void go_on(Actor& actor) {
    current = &actor;
    swapcontext(&test, &actor.context);
    current = nullptr;
}

}  // namespace

void shmstage::await_turn(const void* word, Access access) {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(word) - reinterpret_cast<char*>(&memory));
    if (is_step(offset)) yield(offset, access);
}

// native/slots.cpp is compiled with these two names in place of the real ones.
extern "C" int stepped_clock_gettime(clockid_t, timespec* now) noexcept {
    *now = {};
    return 0;
}

extern "C" long stepped_syscall(long number, ...) noexcept {
    std::va_list arguments;
    va_start(arguments, number);
    const auto* word = va_arg(arguments, const std::uint32_t*);
    const int operation = va_arg(arguments, int);
    const auto value = va_arg(arguments, std::uint32_t);
    va_end(arguments);
    const auto offset = static_cast<std::size_t>(reinterpret_cast<const char*>(word) - reinterpret_cast<char*>(&memory));
    if (operation == FUTEX_WAKE) {
        yield(offset, Access::kFutexWake);
        for (Actor& actor : actors) {
            if (actor.pending == (offset << 8 | static_cast<std::uint64_t>(Access::kAsleep))) actor.woken = true;
        }
        return 0;
    }
    Actor* const me = current;
    me->error = 0;
    yield(offset, Access::kFutexWait);
    if (me->error == 0) {
        if (*word != value) {
            errno = EAGAIN;
            return -1;
        }
        me->woken = false;
        yield(offset, Access::kAsleep);
        if (me->error == 0) return 0;
    }
    errno = me->error;
    return -1;
}

extern "C" {

void* stepped_memory() { return &memory; }

void stepped_reset(std::uint32_t slot_count, std::uint32_t consumer_count, std::uint32_t cells) {
    std::memset(&memory, 0, sizeof memory);
    slots.slot_count = slot_count;
    slots.consumer_count = consumer_count;
    cell_count = cells;
    for (std::uint32_t cell = cells; cell < shmstage::kMaxConsumers; ++cell) memory.pool.cell_owners[cell] = kDone;
    for (Actor& actor : actors) actor.pending = kDone;
}

/// Begins a call and runs it to its first access.
void stepped_start(int number, int op, const std::uint64_t* arguments) {
    Actor& actor = actors[static_cast<std::size_t>(number)];
    actor.op = op;
    std::memcpy(actor.arguments.data(), arguments, sizeof actor.arguments);
    getcontext(&actor.context);
    actor.context.uc_stack.ss_sp = actor.stack.data();
    actor.context.uc_stack.ss_size = actor.stack.size();
    actor.context.uc_link = nullptr;
    makecontext(&actor.context, run, 0);
    go_on(actor);
}

/// Lets the pending access happen; a sleep, or the call that would begin one, ends with `error` if that is not 0.
void stepped_step(int number, int error) {
    Actor& actor = actors[static_cast<std::size_t>(number)];
    actor.error = error;
    go_on(actor);
}

std::uint64_t stepped_pending(int number) { return actors[static_cast<std::size_t>(number)].pending; }
std::uint64_t stepped_result(int number) { return actors[static_cast<std::size_t>(number)].result; }
int stepped_woken(int number) { return actors[static_cast<std::size_t>(number)].woken; }

/// The process that made the call was killed.
void stepped_drop(int number) { actors[static_cast<std::size_t>(number)].pending = kDone; }

}
