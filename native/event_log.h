// Raw instants as JSON lines, made where they are noted. Knows Python: what is noted are keyword arguments.
#pragma once

#include <pybind11/pybind11.h>

namespace shmstage {

void bind_event_log(pybind11::module_& module);

}  // namespace shmstage
