#include "bytes.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <bitset>
#include <cerrno>
#include <cstring>

// Linux 5.14; older C libraries do not name them.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shmstage {

void copy_bytes(void* destination, const void* source, std::size_t nbytes) {
    if (nbytes != 0) std::memcpy(destination, source, nbytes);
}

int populate(void* address, std::size_t nbytes, bool writable) {
    if (nbytes == 0) return 0;
    const int advice = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    while (madvise(address, nbytes, advice) != 0) {
        if (errno != EINTR && errno != EAGAIN) return errno;
    }
    return 0;
}

int interleave(void* address, std::size_t nbytes) {
    constexpr unsigned long kNodes = 1024;  // the kernel's own maximum
    std::array<unsigned long, kNodes / (8 * sizeof(unsigned long))> nodes{};
    // The C library has no functions for these; libnuma would be one more thing to install.
    if (syscall(SYS_get_mempolicy, nullptr, nodes.data(), kNodes, nullptr, MPOL_F_MEMS_ALLOWED) != 0) return -errno;
    if (syscall(SYS_mbind, address, nbytes, MPOL_INTERLEAVE, nodes.data(), kNodes, 0) != 0) return -errno;
    std::size_t count = 0;
    for (const unsigned long word : nodes) count += std::bitset<8 * sizeof(unsigned long)>(word).count();
    return static_cast<int>(count);
}

void advise_huge_pages(void* address, std::size_t nbytes) {
    if (nbytes != 0) static_cast<void>(madvise(address, nbytes, MADV_HUGEPAGE));
}

}  // namespace shmstage
