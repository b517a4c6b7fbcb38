// Copying out of, or into, memory that another process can take away. Call without the GIL.
#pragma once

#include <cstddef>

namespace shmstage {

/// Copies `nbytes` between ranges that do not overlap. False if a page of either range is no longer backed, because
/// a peer has shrunk the file under the mapping: what would be SIGBUS, and the end of the process. The destination
/// then holds part of the source.
///
/// Installs a SIGBUS handler, which passes on whatever is not a fault of a copy that runs in the same thread.
bool copy_guarded(void* destination, const void* source, std::size_t nbytes);

}  // namespace shmstage
