#include "guarded_copy.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace shmstage {
namespace {

struct Range {
    std::uintptr_t begin;
    std::size_t nbytes;

    bool holds(std::uintptr_t address) const { return address - begin < nbytes; }
};

/// One copy of one thread, on its stack.
struct Guard {
    Range ranges[2];
    sigjmp_buf back;
};

// initial-exec: the handler must not be the first to touch it, which could allocate.
__attribute__((tls_model("initial-exec"))) thread_local Guard* volatile running = nullptr;

std::mutex arming;
struct sigaction others {};  // whose turn it is when the fault is none of ours

void on_bus_error(int number, siginfo_t* info, void* context) {
    Guard* guard = running;
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    if (guard != nullptr && (guard->ranges[0].holds(address) || guard->ranges[1].holds(address))) {
        running = nullptr;
        siglongjmp(guard->back, 1);
    }
    if ((others.sa_flags & SA_SIGINFO) != 0) {
        others.sa_sigaction(number, info, context);
    } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
        others.sa_handler(number);
    } else {
        // The faulting instruction runs again, now to the end that a process without us would have met.
        signal(number, SIG_DFL);
    }
}

/// Each time, because others (faulthandler, a framework) install theirs whenever they like.
void arm() {
    const std::lock_guard<std::mutex> held(arming);
    struct sigaction now {};
    if (sigaction(SIGBUS, nullptr, &now) != 0) return;
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error) return;
    others = now;
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

bool copy_guarded(void* destination, const void* source, std::size_t nbytes) {
    if (nbytes == 0) return true;
    arm();
    Guard guard{{{reinterpret_cast<std::uintptr_t>(destination), nbytes},
                 {reinterpret_cast<std::uintptr_t>(source), nbytes}},
                {}};
    // 1: with the signal mask, in which SIGBUS is blocked while the handler runs
    if (sigsetjmp(guard.back, 1) != 0) return false;
    running = &guard;
    std::memcpy(destination, source, nbytes);
    running = nullptr;
    return true;
}

}  // namespace shmstage
