// Moving and pre-faulting many bytes. Call without the GIL.
#pragma once

#include <cstddef>

namespace shmstage {

/// Copies `nbytes`; the two ranges must not overlap.
void copy_bytes(void* destination, const void* source, std::size_t nbytes);

/// Makes every page of a page-aligned shared mapping present. Returns 0, or the errno of the kernel, which
/// reports a full mount as EFAULT here instead of killing the process with SIGBUS.
int populate(void* address, std::size_t nbytes, bool writable);

/// Spreads pages that do not exist yet evenly over the NUMA nodes this process may use. Returns how many these are, or
/// minus the errno of the kernel (ENOSYS: it knows no NUMA).
int interleave(void* address, std::size_t nbytes);

/// Asks for huge pages; a mount that does not allow them ignores it.
void advise_huge_pages(void* address, std::size_t nbytes);

}  // namespace shmstage
