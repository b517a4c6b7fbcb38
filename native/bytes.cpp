#include "bytes.h"

#include <sys/mman.h>

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

void advise_huge_pages(void* address, std::size_t nbytes) {
    if (nbytes != 0) static_cast<void>(madvise(address, nbytes, MADV_HUGEPAGE));
}

}  // namespace shmstage
