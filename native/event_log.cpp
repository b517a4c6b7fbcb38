#include "event_log.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace shmstage {
namespace {

constexpr std::array kNames{"event", "t", "end", "step", "index", "request_id"};
enum Argument : std::size_t { kEvent, kBegin, kEnd, kStep, kIndex, kRequestId };

/// What one call of `note` says, borrowed from it; nullptr: not said.
using Noted = std::array<PyObject*, kNames.size()>;

long long monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

/// Of an argument that may be left out.
long long number_or(PyObject* argument, long long other) {
    if (argument == nullptr) return other;
    const long long number = PyLong_AsLongLong(argument);
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
}

bool is_true(PyObject* argument) {
    const int found = PyObject_IsTrue(argument);
    if (found < 0) throw py::error_already_set();
    return found == 1;
}

void append_number(std::string& out, std::string_view name, long long value) {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    out.append(name).append(digits.data(), end);
}

/// Room for a line that is kept for the next one.
constexpr std::size_t kSpareNbytes = 64 << 10;

/// Lines that wait to be written, at most `capacity_nbytes` of them. Only touched with the GIL held.
class EventLog {
  public:
    EventLog(py::dict named, py::function dumps, std::size_t capacity_nbytes)
        : named_(std::move(named)), dumps_(std::move(dumps)), capacity_nbytes_(capacity_nbytes) {
        for (std::size_t at = 0; at < kNames.size(); ++at) {
            interned_[at] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kNames[at]));
        }
    }

    /// What cannot be a line is dropped, counted, and the first of it told by `take`. False: an interrupt came while
    /// Python made a part of it, which is its caller's, and set.
    bool note(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
        if (closed_ || lines_.size() >= capacity_nbytes_) {
            ++dropped_;
            return true;
        }
        // Its own until it is whole: `dumps` is Python, and another thread may note meanwhile.
        std::string line = std::move(spare_);
        line.clear();
        try {
            make_line(line, arguments, count, names);
            if (line.size() > capacity_nbytes_) throw py::value_error("too long");
            lines_.append(line);
        } catch (py::error_already_set& error) {
            ++dropped_;
            if (!error.matches(PyExc_Exception)) {
                error.restore();
                return false;
            }
            keep_fault(arguments, count, error.what());
        } catch (const std::exception& error) {
            ++dropped_;
            keep_fault(arguments, count, error.what());
        }
        if (line.capacity() <= kSpareNbytes) spare_ = std::move(line);
        return true;
    }

    /// (lines, how many were dropped, what the first of them failed for); begins anew.
    py::tuple take() {
        std::string lines = std::exchange(lines_, std::string());
        lines_.reserve(std::min(lines.size(), capacity_nbytes_));
        const auto dropped = std::exchange(dropped_, 0);
        return py::make_tuple(py::str(lines), dropped, py::str(std::exchange(fault_, std::string())));
    }

    void close() { closed_ = true; }

  private:
    void make_line(std::string& line, PyObject* const* arguments, Py_ssize_t count, PyObject* names) const {
        const Py_ssize_t named_count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        Noted noted{};
        if (count > static_cast<Py_ssize_t>(kEnd) + 1) throw py::type_error("note(event, t, end, **figures)");
        std::copy_n(arguments, count, noted.begin());
        for (Py_ssize_t at = 0; at < named_count; ++at) {
            const std::size_t place = place_of(PyTuple_GET_ITEM(names, at));
            if (place < noted.size()) noted[place] = arguments[count + at];
        }
        const long long begin = number_or(noted[kBegin], 0), end = number_or(noted[kEnd], 0);
        append_number(line, "{\"t\":", begin != 0 ? begin : monotonic_ns());
        if (end != 0) append_number(line, ",\"end\":", end);
        line.append(1, ',').append(what_it_is(noted[kEvent]));
        const long long step = number_or(noted[kStep], -1), index = number_or(noted[kIndex], -1);
        if (step >= 0) append_number(line, ",\"step\":", step);
        if (step >= 0 && index >= 0) append_number(line, ",\"index\":", index);
        if (noted[kRequestId] != nullptr && is_true(noted[kRequestId])) {
            line.append(",\"id\":");
            append_text(line, noted[kRequestId]);
        }
        for (Py_ssize_t at = 0; at < named_count; ++at) {
            PyObject* name = PyTuple_GET_ITEM(names, at);
            if (place_of(name) < noted.size()) continue;
            line.append(1, ',');
            append_text(line, name);
            line.append(1, ':');
            append_value(line, arguments[count + at]);
        }
        line.append("}\n");
    }

    /// Which argument has this name; beyond the last: it is a figure.
    std::size_t place_of(PyObject* name) const {
        const bool interned = PyUnicode_CHECK_INTERNED(name) != 0;  // as every name is that stands in code
        std::size_t at = 0;
        for (; at < kNames.size(); ++at) {
            if (name == interned_[at].ptr()) break;
            if (!interned && PyUnicode_CompareWithASCIIString(name, kNames[at]) == 0) break;
        }
        return at;
    }

    /// The event and the first line of what it failed for.
    void keep_fault(PyObject* const* arguments, Py_ssize_t count, std::string_view why) {
        if (!fault_.empty()) return;
        if (count > 0 && PyUnicode_Check(arguments[0]) && PyUnicode_IS_ASCII(arguments[0])) {
            fault_.append(static_cast<const char*>(PyUnicode_DATA(arguments[0]))).append(": ");
        }
        fault_.append(why.substr(0, why.find('\n')));
    }

    /// The members event and lane.
    std::string_view what_it_is(PyObject* event) const {
        PyObject* found = event == nullptr ? nullptr : PyDict_GetItemWithError(named_.ptr(), event);
        if (found == nullptr) {
            PyErr_Clear();
            throw py::key_error("no event " + (event == nullptr ? "" : py::repr(event).cast<std::string>()));
        }
        return py::cast<std::string_view>(py::handle(found));
    }

    /// The text in quotes; what has to be escaped is left to `dumps`.
    void append_text(std::string& out, PyObject* text) const {
        if (PyUnicode_Check(text) && PyUnicode_IS_ASCII(text)) {
            const std::string_view plain(
                static_cast<const char*>(PyUnicode_DATA(text)), static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))
            );
            if (std::all_of(plain.begin(), plain.end(), [](char letter) {
                    return letter >= ' ' && letter != '"' && letter != '\\';
                })) {
                out.append(1, '"').append(plain).append(1, '"');
                return;
            }
        }
        out.append(py::cast<std::string>(dumps_(py::handle(text))));
    }

    void append_value(std::string& out, PyObject* value) const {
        if (PyLong_CheckExact(value)) {
            int overflow = 0;
            const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow == 0) {
                append_number(out, "", number);
                return;
            }
        }
        append_text(out, value);
    }

    std::array<py::object, kNames.size()> interned_;
    py::dict named_;
    py::function dumps_;
    std::size_t capacity_nbytes_;
    std::string lines_, spare_, fault_;
    long long dropped_ = 0;
    bool closed_ = false;
};

constexpr const char* kCapsule = "shmstage.EventLog";

PyObject* note(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    auto& log = *static_cast<std::shared_ptr<EventLog>*>(PyCapsule_GetPointer(capsule, kCapsule));
    if (!log->note(arguments, count, names)) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef note_definition{
    "note", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(note)), METH_FASTCALL | METH_KEYWORDS,
    "note(event, t=0, end=0, *, step=-1, index=-1, request_id='', **figures)"
};

/// A plain C function: what pybind11 wraps takes longer to be called than all that is done here.
py::object note_of(const std::shared_ptr<EventLog>& log) {
    const auto free = [](PyObject* capsule) {
        delete static_cast<std::shared_ptr<EventLog>*>(PyCapsule_GetPointer(capsule, kCapsule));
    };
    auto held = std::make_unique<std::shared_ptr<EventLog>>(log);
    const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(held.get(), kCapsule, free));
    if (!capsule) throw py::error_already_set();
    held.release();
    const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&note_definition, capsule.ptr()));
    if (!function) throw py::error_already_set();
    return function;
}

}  // namespace

void bind_event_log(py::module_& module) {
    py::class_<EventLog, std::shared_ptr<EventLog>>(
        module, "EventLog",
        "Events as JSON lines, made where they are noted, until somebody takes them.\n\n"
        "named: event to its members event and lane, as JSON. dumps: for what is neither an integer nor plain ASCII.\n"
        "capacity_nbytes: with so many waiting, what is noted is dropped and counted."
    )
        .def(py::init<py::dict, py::function, std::size_t>(), py::arg("named"), py::arg("dumps"),
             py::arg("capacity_nbytes"))
        .def_property_readonly("note", &note_of, "A function to note one event with; it raises nothing but an interrupt.")
        .def("take", &EventLog::take,
             "(lines, events dropped since the last take, what the first that could not be a line failed for or '').")
        .def("close", &EventLog::close, "From now on everything is dropped.");
}

}  // namespace shmstage
