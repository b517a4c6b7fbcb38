#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace shmstage {

namespace {

/// Less is not worth a thread, which takes some 50 us to start.
constexpr std::uint64_t kThreadNbytes = std::uint64_t{2} << 20;
/// Small enough that threads end together, large enough that a part's two ends do not matter.
constexpr std::uint64_t kPartNbytes = std::uint64_t{1} << 20;
/// From here on what is written would only push other things out of the cache.
constexpr std::uint64_t kStreamingNbytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kMostThreads = 8;  ///< memory bandwidth is exhausted by then

/// Asked once: the answer is read from a file of the kernel's.
std::uint64_t cores() {
    static const std::uint64_t found = std::thread::hardware_concurrency();
    return found;
}

}  // namespace

void Work::add(std::uint64_t positions, std::uint64_t nbytes, std::function<void(const Part&)> write) {
    if (positions == 0) return;
    fields_.push_back({positions, nbytes, std::move(write)});
    total_nbytes_ += positions * nbytes;
}

void Work::run(unsigned threads) const {
    struct Task {
        const Field* field;
        Part part;
    };
    const bool streaming = total_nbytes_ >= kStreamingNbytes;
    std::uint64_t wanted = std::min<std::uint64_t>(threads, kMostThreads);
    if (threads == 0) {
        wanted = std::min<std::uint64_t>(cores(), total_nbytes_ / kThreadNbytes);
        wanted = std::min(wanted, kMostThreads);
    }
    std::vector<Task> tasks;
    for (const Field& field : fields_) {
        // whole multiples of 64 positions: parts then share no cache line where the field begins at one
        const std::uint64_t each =
            wanted < 2 ? field.positions
                       : std::max<std::uint64_t>(kPartNbytes / std::max<std::uint64_t>(field.nbytes, 1) / 64, 1) * 64;
        for (std::uint64_t first = 0; first < field.positions; first += each) {
            tasks.push_back({&field, {first, std::min(first + each, field.positions), streaming}});
        }
    }
    std::atomic<std::size_t> next{0};
    std::atomic<bool> failed{false};
    const auto drain = [&] {
        try {
            for (std::size_t i = next++; i < tasks.size(); i = next++) tasks[i].field->write(tasks[i].part);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    };
    std::vector<std::thread> helpers;
    helpers.reserve(wanted);
    try {
        for (std::uint64_t i = 1; i < std::min<std::uint64_t>(wanted, tasks.size()); ++i) helpers.emplace_back(drain);
    } catch (const std::system_error&) {
        // no more threads are to be had: those there are do all of it
    }
    drain();
    for (std::thread& helper : helpers) helper.join();
    if (failed) throw std::bad_alloc();
}

}  // namespace shmstage
