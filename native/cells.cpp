#include "cells.h"

#include "atomics.h"

namespace shmstage {

void set_latest(const Slots& pool, std::uint64_t word) { store_ordered(pool.pool->latest, word); }

std::uint64_t latest(const Slots& pool) { return load_ordered(pool.pool->latest); }

std::int32_t claim_cell(const Slots& pool, std::uint64_t identity) {
    for (std::uint32_t index = 0; index < kMaxConsumers; ++index) {
        if (exchange_if_equal(pool.pool->cell_owners[index], std::uint64_t{0}, identity)) {
            return static_cast<std::int32_t>(index);
        }
    }
    return -1;
}

bool release_cell(const Slots& pool, std::uint32_t cell, std::uint64_t identity) {
    if (identity == 0 || load_ordered(pool.pool->cell_owners[cell]) != identity) return false;
    // Emptied first: whoever claims the cell next must not find what its last reader took.
    store_ordered(pool.pool->cell_words[cell], std::uint64_t{0});
    return exchange_if_equal(pool.pool->cell_owners[cell], identity, std::uint64_t{0});
}

std::uint64_t take_latest(const Slots& pool, std::uint32_t cell) {
    while (true) {
        const std::uint64_t word = load_ordered(pool.pool->latest);
        store_ordered(pool.pool->cell_words[cell], word);
        // Still the newest: then the owner, whose look at the cells comes after it names another, sees ours. If not,
        // it may have looked before we wrote.
        if (load_ordered(pool.pool->latest) == word) return word;
    }
}

void put_back(const Slots& pool, std::uint32_t cell) {
    store_ordered(pool.pool->cell_words[cell], std::uint64_t{0});
}

Cell cell(const Slots& pool, std::uint32_t index) {
    return {load_ordered(pool.pool->cell_owners[index]), load_ordered(pool.pool->cell_words[index])};
}

}  // namespace shmstage
