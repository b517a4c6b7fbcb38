// Knows Python, as event_log.cpp alone does beside it: argument checks, buffers, the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "atomics.h"
#include "bytes.h"
#include "cells.h"
#include "event_log.h"
#include "fill.h"
#include "guarded_copy.h"
#include "parallel.h"
#include "record.h"
#include "routing.h"
#include "slot_header.h"
#include "slots.h"
#include "window.h"

namespace py = pybind11;

namespace {

/// A contiguous buffer, held until destroyed. PyBUF_SIMPLE: bfloat16 arrays export bytes but no format.
class Buffer {
  public:
    Buffer(const py::handle& object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
            throw py::error_already_set();
        }
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

/// Bytes to read, as long as `keeper` lives. A numpy array builds a description at every request for its buffer, which
/// takes longer than copying a short one: its pointer is taken instead, and a reference keeps it, as it keeps numpy
/// from resizing it.
struct SourceBytes {
    py::object keeper;
    const std::byte* data;
    std::size_t nbytes;
};

SourceBytes source_bytes(const py::handle& object) {
    if (py::isinstance<py::array>(object)) {
        const auto array = py::reinterpret_borrow<py::array>(object);
        if ((array.flags() & py::array::c_style) == 0) throw py::value_error("source is not C-contiguous");
        return {array, static_cast<const std::byte*>(array.data()), static_cast<std::size_t>(array.nbytes())};
    }
    auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
    if (!view) throw py::error_already_set();
    const Py_buffer* buffer = PyMemoryView_GET_BUFFER(view.ptr());
    if (PyBuffer_IsContiguous(buffer, 'C') == 0) throw py::value_error("source is not C-contiguous");
    return {std::move(view), static_cast<const std::byte*>(buffer->buf), static_cast<std::size_t>(buffer->len)};
}

std::string text_of(const char* field, std::size_t capacity) { return {field, strnlen(field, capacity)}; }

void put_text(char* field, std::size_t capacity, const std::string& text) {
    if (text.size() >= capacity) throw py::value_error("text of " + std::to_string(text.size()) + " bytes, limit " +
                                                       std::to_string(capacity - 1));
    std::memset(field, 0, capacity);
    std::memcpy(field, text.data(), text.size());
}

/// The mapped headers of one pool, for Python. Holds the mapping's buffer until release().
class Headers {
  public:
    Headers(const py::handle& mapping, std::uint32_t slot_count, std::uint32_t consumer_count, std::uint64_t epoch)
        : buffer_(new Buffer(mapping, true)), epoch_(epoch) {
        if (buffer_->nbytes() < sizeof(shmstage::PoolHeader)) throw py::value_error("mapping smaller than a header");
        const std::size_t room = (buffer_->nbytes() - sizeof(shmstage::PoolHeader)) / sizeof(shmstage::SlotHeader);
        if (slot_count > room) throw py::value_error("mapping smaller than its slot headers");
        if (consumer_count > shmstage::kMaxConsumers) throw py::value_error("too many consumers");
        std::byte* begin = buffer_->data();
        slots_.pool = reinterpret_cast<shmstage::PoolHeader*>(begin);
        slots_.slots = reinterpret_cast<shmstage::SlotHeader*>(begin + sizeof(shmstage::PoolHeader));
        slots_.slot_count = slot_count;
        slots_.consumer_count = consumer_count;
    }

    void release() { buffer_.reset(); }

    void write_owner(const std::string& run_id, const std::string& lock_path, std::uint32_t pid,
                     std::uint64_t start_ticks, std::uint64_t namespace_word) {
        shmstage::PoolHeader& header = pool();
        put_text(header.run_id, sizeof header.run_id, run_id);
        put_text(header.lock_path, sizeof header.lock_path, lock_path);
        header.owner_pid = pid;
        header.owner_start_ticks = start_ticks;
        header.owner_namespace = namespace_word;
        header.abi_version = shmstage::kAbiVersion;
        std::memcpy(header.magic, shmstage::kMagic, sizeof header.magic);
    }

    void write_geometry(std::uint64_t pool_nbytes, std::uint64_t payload_offset, std::uint64_t slot_stride,
                        std::uint32_t aux_slot_count, std::uint32_t payload_shift, bool huge_pages, bool interleaved) {
        shmstage::PoolHeader& header = pool();
        header.epoch = epoch_;
        header.pool_nbytes = pool_nbytes;
        header.payload_offset = payload_offset;
        header.slot_stride = slot_stride;
        header.slot_count = slots_.slot_count;
        header.aux_slot_count = aux_slot_count;
        header.consumer_count = slots_.consumer_count;
        header.payload_shift = payload_shift;
        header.backing = (huge_pages ? shmstage::kHugePages : 0U) | (interleaved ? shmstage::kInterleaved : 0U);
    }

    void mark_ready() { shmstage::store_release(pool().ready, std::uint32_t{1}); }

    py::dict describe() const {
        const shmstage::PoolHeader& header = pool();
        py::dict out;
        out["ready"] = shmstage::load_acquire(header.ready) == 1;
        out["magic"] = std::memcmp(header.magic, shmstage::kMagic, sizeof header.magic) == 0;
        out["abi_version"] = header.abi_version;
        out["epoch"] = header.epoch;
        out["pool_nbytes"] = header.pool_nbytes;
        out["payload_offset"] = header.payload_offset;
        out["slot_stride"] = header.slot_stride;
        out["slot_count"] = header.slot_count;
        out["aux_slot_count"] = header.aux_slot_count;
        out["consumer_count"] = header.consumer_count;
        out["payload_shift"] = header.payload_shift;
        out["owner_pid"] = header.owner_pid;
        out["owner_start_ticks"] = header.owner_start_ticks;
        out["owner_namespace"] = header.owner_namespace;
        out["huge_pages"] = (header.backing & shmstage::kHugePages) != 0;
        out["interleaved"] = (header.backing & shmstage::kInterleaved) != 0;
        out["heartbeat_ns"] = shmstage::load_relaxed(header.heartbeat_ns);
        // bytes: another process wrote them, they need not be text
        out["run_id"] = py::bytes(text_of(header.run_id, sizeof header.run_id));
        out["lock_path"] = py::bytes(text_of(header.lock_path, sizeof header.lock_path));
        out["last_error"] = py::bytes(text_of(header.last_error, sizeof header.last_error));
        return out;
    }

    std::vector<std::uint64_t> counters() const {
        std::vector<std::uint64_t> out;
        for (const std::uint64_t& counter : pool().counters) out.push_back(shmstage::load_relaxed(counter));
        return out;
    }

    void set_heartbeat(std::uint64_t now_ns) { shmstage::store_relaxed(pool().heartbeat_ns, now_ns); }
    void set_last_error(const std::string& text) { put_text(pool().last_error, sizeof pool().last_error, text); }
    void set_consumer_pid(std::uint32_t consumer, std::uint32_t pid) {
        shmstage::store_relaxed(pool().consumer_pids[checked_consumer(consumer)], pid);
    }
    std::uint32_t consumer_pid(std::uint32_t consumer) const {
        return shmstage::load_relaxed(pool().consumer_pids[checked_consumer(consumer)]);
    }

    std::int32_t claim(std::uint32_t first, std::uint32_t last, std::int64_t timeout_ns) const {
        const shmstage::Slots& slots = checked();
        if (first > last || last > slots.slot_count) throw py::index_error("slots out of range");
        const py::gil_scoped_release released;
        return shmstage::claim(slots, first, last, timeout_ns);
    }

    std::uint64_t publish(std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                          std::uint64_t target_mask, std::uint64_t step, std::uint32_t index) const {
        return shmstage::publish(checked(), checked_slot(slot), generation, layout_id, target_mask, step, index);
    }

    bool discard(std::uint32_t slot, std::uint64_t generation) const {
        return shmstage::discard(checked(), checked_slot(slot), generation);
    }

    int lease_state(std::uint32_t slot, std::uint64_t generation, std::uint32_t layout_id,
                    std::uint32_t consumer) const {
        return static_cast<int>(shmstage::lease_state(checked(), checked_slot(slot), generation, layout_id,
                                                      checked_consumer(consumer), epoch_));
    }

    bool end_lease(std::uint32_t slot, std::uint64_t generation, std::uint32_t consumer) const {
        return shmstage::end_lease(checked(), checked_slot(slot), generation, checked_consumer(consumer));
    }

    bool is_free(std::uint32_t slot) const { return shmstage::is_free(checked(), checked_slot(slot)); }
    void wake_all() const { shmstage::wake_all(checked()); }

    std::uint32_t waiter_count() const { return shmstage::load_ordered(pool().waiter_count); }

    std::uint64_t latest() const { return shmstage::latest(checked()); }
    void set_latest(std::uint64_t word) const { shmstage::set_latest(checked(), word); }

    std::int32_t claim_cell(std::uint64_t identity) const {
        if (identity == 0) throw py::value_error("identity 0 stands for nobody");
        return shmstage::claim_cell(checked(), identity);
    }

    bool release_cell(std::uint32_t cell, std::uint64_t identity) const {
        return shmstage::release_cell(checked(), checked_cell(cell), identity);
    }

    std::uint64_t take_latest(std::uint32_t cell) const { return shmstage::take_latest(checked(), checked_cell(cell)); }
    void put_back(std::uint32_t cell) const { shmstage::put_back(checked(), checked_cell(cell)); }

    /// (identity, word)
    py::tuple cell(std::uint32_t index) const {
        const shmstage::Cell found = shmstage::cell(checked(), checked_cell(index));
        return py::make_tuple(found.identity, found.word);
    }

    std::uint64_t generation(std::uint32_t slot) const {
        return shmstage::load_acquire(checked().slots[checked_slot(slot)].generation);
    }

    /// (generation, target_mask, layout_id, step, index, ended per consumer), for messages.
    py::tuple slot_state(std::uint32_t slot) const {
        const shmstage::SlotHeader& header = checked().slots[checked_slot(slot)];
        std::vector<std::uint64_t> ended;
        for (std::uint32_t consumer = 0; consumer < slots_.consumer_count; ++consumer) {
            ended.push_back(shmstage::load_acquire(header.ended[consumer]));
        }
        return py::make_tuple(shmstage::load_acquire(header.generation), shmstage::load_acquire(header.target_mask),
                              shmstage::load_relaxed(header.layout_id), shmstage::load_relaxed(header.step),
                              shmstage::load_relaxed(header.index), ended);
    }

    std::uint64_t slot_since_ns(std::uint32_t slot) const {
        return shmstage::load_relaxed(checked().slots[checked_slot(slot)].since_ns);
    }

    std::uint32_t late_version(std::uint32_t slot, std::uint32_t field) const {
        return shmstage::load_acquire(late_word(slot, field));
    }

    void bump_late_version(std::uint32_t slot, std::uint32_t field) const {
        std::uint32_t& word = late_word(slot, field);
        shmstage::store_release(word, shmstage::load_relaxed(word) + 1);
    }

  private:
    shmstage::PoolHeader& pool() const { return *checked().pool; }

    const shmstage::Slots& checked() const {
        if (!buffer_) throw std::runtime_error("pool headers used after release");
        return slots_;
    }

    std::uint32_t checked_slot(std::uint32_t slot) const {
        if (slot >= slots_.slot_count) throw py::index_error("slot out of range");
        return slot;
    }

    std::uint32_t checked_consumer(std::uint32_t consumer) const {
        if (consumer >= slots_.consumer_count) throw py::index_error("consumer out of range");
        return consumer;
    }

    static std::uint32_t checked_cell(std::uint32_t cell) {
        if (cell >= shmstage::kMaxConsumers) throw py::index_error("cell out of range");
        return cell;
    }

    std::uint32_t& late_word(std::uint32_t slot, std::uint32_t field) const {
        if (field >= shmstage::kMaxLateFields) throw py::index_error("late field out of range");
        return checked().slots[checked_slot(slot)].late_versions[field];
    }

    std::unique_ptr<Buffer> buffer_;  ///< keeps the mapping exported, so that it cannot be unmapped under us
    shmstage::Slots slots_{};         ///< points into buffer_
    std::uint64_t epoch_;
};

void bind_memory(py::module_& module) {
    module.attr("ABI_VERSION") = shmstage::kAbiVersion;
    module.attr("MAX_CONSUMERS") = shmstage::kMaxConsumers;
    module.attr("MAX_LATE_FIELDS") = shmstage::kMaxLateFields;
    module.attr("POOL_HEADER_NBYTES") = sizeof(shmstage::PoolHeader);
    module.attr("SLOT_HEADER_NBYTES") = sizeof(shmstage::SlotHeader);

    py::class_<Headers>(module, "Headers", "Mapped pool and slot headers; holds the mapping until release().")
        .def(py::init<py::handle, std::uint32_t, std::uint32_t, std::uint64_t>(), py::arg("mapping"),
             py::arg("slot_count"), py::arg("consumer_count"), py::arg("epoch"))
        .def("release", &Headers::release)
        .def("write_owner", &Headers::write_owner, py::arg("run_id"), py::arg("lock_path"), py::arg("pid"),
             py::arg("start_ticks"), py::arg("namespace_word") = 0)
        .def("write_geometry", &Headers::write_geometry, py::kw_only(), py::arg("pool_nbytes"),
             py::arg("payload_offset"), py::arg("slot_stride"), py::arg("aux_slot_count"), py::arg("payload_shift"),
             py::arg("huge_pages") = false, py::arg("interleaved") = false)
        .def("mark_ready", &Headers::mark_ready)
        .def("describe", &Headers::describe)
        .def("counters", &Headers::counters)
        .def("set_heartbeat", &Headers::set_heartbeat)
        .def("set_last_error", &Headers::set_last_error)
        .def("set_consumer_pid", &Headers::set_consumer_pid)
        .def("consumer_pid", &Headers::consumer_pid)
        .def("claim", &Headers::claim)
        .def("publish", &Headers::publish)
        .def("discard", &Headers::discard)
        .def("lease_state", &Headers::lease_state)
        .def("end_lease", &Headers::end_lease)
        .def("is_free", &Headers::is_free)
        .def("wake_all", &Headers::wake_all)
        .def("waiter_count", &Headers::waiter_count)
        .def("latest", &Headers::latest)
        .def("set_latest", &Headers::set_latest)
        .def("claim_cell", &Headers::claim_cell)
        .def("release_cell", &Headers::release_cell)
        .def("take_latest", &Headers::take_latest)
        .def("put_back", &Headers::put_back)
        .def("cell", &Headers::cell)
        .def("generation", &Headers::generation)
        .def("slot_state", &Headers::slot_state)
        .def("slot_since_ns", &Headers::slot_since_ns)
        .def("late_version", &Headers::late_version)
        .def("bump_late_version", &Headers::bump_late_version);

    module.def(
        "copy_into",
        [](const py::handle& destination, const py::handle& source) {
            const Buffer to(destination, true);
            const Buffer from(source, false);
            if (to.nbytes() != from.nbytes()) {
                throw py::value_error("copy of " + std::to_string(from.nbytes()) + " bytes into " +
                                      std::to_string(to.nbytes()));
            }
            const py::gil_scoped_release released;
            shmstage::copy_bytes(to.data(), from.data(), to.nbytes());
        },
        py::arg("destination"), py::arg("source"),
        "Copies bytes between two contiguous buffers of equal size, GIL released. ValueError if sizes differ.");

    module.def(
        "copy_guarded",
        [](const py::handle& destination, const py::handle& source) {
            const Buffer to(destination, true);
            const Buffer from(source, false);
            if (to.nbytes() != from.nbytes()) {
                throw py::value_error("copy of " + std::to_string(from.nbytes()) + " bytes into " +
                                      std::to_string(to.nbytes()));
            }
            const py::gil_scoped_release released;
            return shmstage::copy_guarded(to.data(), from.data(), to.nbytes());
        },
        py::arg("destination"), py::arg("source"),
        "As copy_into; False, where that is the end of the process, if memory of either lies beyond its file's end.");

    module.def(
        "interleave",
        [](const py::handle& mapping) {
            const Buffer buffer(mapping, true);
            return shmstage::interleave(buffer.data(), buffer.nbytes());
        },
        py::arg("mapping"), "Spreads pages not yet touched over all NUMA nodes; their number, or minus an errno.");

    module.def(
        "populate",
        [](const py::handle& mapping, bool writable) {
            const Buffer buffer(mapping, writable);
            const py::gil_scoped_release released;
            return shmstage::populate(buffer.data(), buffer.nbytes(), writable);
        },
        py::arg("mapping"), py::arg("writable"), "Pre-faults a mapping; returns 0 or an errno.");

    module.def(
        "advise_huge_pages",
        [](const py::handle& mapping) {
            const Buffer buffer(mapping, true);
            shmstage::advise_huge_pages(buffer.data(), buffer.nbytes());
        },
        py::arg("mapping"));
}

// --- packing ---------------------------------------------------------------------------------------------

/// a * b for sizes that came from Python; refuses what does not fit in 64 bits.
std::uint64_t product(std::uint64_t a, std::uint64_t b) {
    std::uint64_t out = 0;
    if (__builtin_mul_overflow(a, b, &out)) throw py::value_error("size does not fit in 64 bits");
    return out;
}

void check_nbytes(const char* what, std::uint64_t got, std::uint64_t want) {
    if (got != want) {
        throw py::value_error(std::string(what) + " of " + std::to_string(got) + " bytes, want " +
                              std::to_string(want));
    }
}

shmstage::RoutingShape routing_shape(std::uint64_t layers, std::uint64_t top_k, unsigned bits) {
    const std::uint64_t ids = product(layers, top_k);
    if (ids == 0) throw py::value_error("routing without layers or without ids");
    // a group of 8 tokens, dense or packed, is counted in 64 bits
    product(ids, shmstage::kGroup * sizeof(std::int16_t));
    if (bits > shmstage::kMostBits) {
        throw py::value_error("ids of " + std::to_string(bits) + " bits, at most " +
                              std::to_string(shmstage::kMostBits));
    }
    return {layers, top_k, bits};
}

shmstage::RoutingShape packed_shape(std::uint64_t layers, std::uint64_t top_k, unsigned bits) {
    if (bits == 0) throw py::value_error("packed ids of 0 bits");
    return routing_shape(layers, top_k, bits);
}

/// Bytes of held tokens, from a number of tokens that came from Python.
std::uint64_t checked_held_nbytes(const shmstage::RoutingShape& shape, std::uint64_t tokens) {
    if (tokens > std::numeric_limits<std::int32_t>::max()) throw py::value_error("more than 2**31 - 1 tokens");
    product(tokens / shmstage::kGroup + 1, shape.group_nbytes() + shape.layers);
    return shmstage::held_nbytes(shape, tokens);
}

/// array, tokens, layers, top_k, bits: bits 0 is dense int16, else what pack_routing made
using HeldRouting = std::tuple<py::object, std::uint64_t, std::uint64_t, std::uint64_t, unsigned>;

/// A record and the arrays that it points into.
class PyRecord {
  public:
    PyRecord(std::uint64_t tokens, const py::sequence& words, const std::optional<HeldRouting>& routing,
             std::uint64_t loss_tokens, std::uint32_t experts, std::uint64_t begin) {
        if (std::max(tokens, begin) > std::numeric_limits<std::int32_t>::max()) {
            throw py::value_error("more than 2**31 - 1 tokens");
        }
        record_.begin = begin;
        if (words.size() > shmstage::kMostFields) {
            throw py::value_error(std::to_string(words.size()) + " fields, at most " +
                                  std::to_string(shmstage::kMostFields));
        }
        record_.tokens = tokens;
        record_.loss_tokens = loss_tokens;
        record_.experts = experts;
        for (std::size_t i = 0; i < words.size(); ++i) {
            const py::object given = words[i];
            if (given.is_none()) continue;
            SourceBytes from = source_bytes(given);
            check_nbytes("field", from.nbytes, tokens * shmstage::kWordNbytes);
            record_.words[i] = from.data;
            record_.present |= 1U << i;
            kept_[i] = std::move(from.keeper);
        }
        if (routing) take(*routing);
    }

    const shmstage::Record& record() const { return record_; }

  private:
    void take(const HeldRouting& routing) {
        const auto& [array, tokens, layers, top_k, bits] = routing;
        const shmstage::RoutingShape shape = routing_shape(layers, top_k, bits);
        if (tokens > record_.tokens) throw py::value_error("routing of more tokens than there are");
        SourceBytes from = source_bytes(array);
        // held in whole groups of the trajectory, wherever it was cut
        const std::uint64_t skipped = bits != 0 && tokens != 0 ? record_.begin % shmstage::kGroup : 0;
        check_nbytes("routing", from.nbytes,
                     bits == 0 ? product(tokens, shape.token_nbytes()) : checked_held_nbytes(shape, skipped + tokens));
        record_.shape = shape;
        if (bits == 0) {
            record_.routing = {from.data, tokens, false};
        } else {
            record_.routing = shmstage::held_source(from.data, skipped, tokens, shape);
        }
        kept_.back() = std::move(from.keeper);
    }

    shmstage::Record record_;
    std::array<py::object, shmstage::kMostFields + 1> kept_;  ///< of each field, and of routing
};

/// What all the records of a micro-batch have in common.
class Kind {
  public:
    void add(const shmstage::Record& record) {
        if (first_ == nullptr) first_ = &record;
        if (!same_kind(record, *first_)) throw py::value_error("records of different fields");
        if (!record.routing.held) return;
        if (held_bits_ != 0 && held_bits_ != record.shape.bits) {
            throw py::value_error("routing packed in " + std::to_string(held_bits_) + " and in " +
                                  std::to_string(record.shape.bits) + " bits");
        }
        held_bits_ = record.shape.bits;
    }

    /// Null: there are none.
    const shmstage::Record* first() const { return first_; }
    /// Bits of the ids that are held packed; 0: none are.
    unsigned held_bits() const { return held_bits_; }

  private:
    const shmstage::Record* first_ = nullptr;
    unsigned held_bits_ = 0;
};

/// Asks for the first lines of what will be read soon: the objects of thousands of trajectories lie anywhere.
void ask_for(const void* address, std::size_t nbytes) {
    constexpr std::size_t kLine = 64;
    for (std::size_t i = 0; i < nbytes; i += kLine) __builtin_prefetch(static_cast<const char*>(address) + i);
}

/// The records of a planned micro-batch in its order, checked against the plan and against each other.
class Gathered {
  public:
    Gathered(const py::sequence& rows, const py::object& trajectories) : rows_(rows) {
        const std::vector<PyObject*> found = segments_of();
        kept_ = py::tuple(found.size());
        look_up(found, trajectories);
        check(found);
        totals_ = shmstage::totals_of(records_);
    }

    std::uint64_t rows() const { return rows_.size(); }
    const std::vector<shmstage::Segment>& segments() const { return segments_; }
    const std::vector<const shmstage::Record*>& records() const { return records_; }
    const shmstage::Totals& totals() const { return totals_; }
    const Kind& kind() const { return kind_; }

  private:
    /// How many trajectories ahead their objects are asked for.
    static constexpr std::size_t kAhead = 8;

    /// Borrowed of the rows, which are ours.
    std::vector<PyObject*> segments_of() const {
        std::vector<PyObject*> found;
        for (const py::handle row : rows_) {
            if (!PyTuple_Check(row.ptr())) throw py::type_error("a row is no tuple of segments");
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row.ptr()); ++i) {
                found.push_back(PyTuple_GET_ITEM(row.ptr(), i));
                ask_for(found.back(), 1);
            }
        }
        for (PyObject* segment : found) {
            if (!PyTuple_Check(segment) || PyTuple_GET_SIZE(segment) != 3) throw py::type_error("not a segment");
            for (Py_ssize_t i = 0; i < 3; ++i) ask_for(PyTuple_GET_ITEM(segment, i), 1);
        }
        return found;
    }

    /// Puts the record of each segment's trajectory into kept_.
    void look_up(const std::vector<PyObject*>& segments, const py::object& trajectories) {
        const py::str attribute = py::reinterpret_steal<py::str>(PyUnicode_InternFromString("record"));
        const bool plain = PyDict_CheckExact(trajectories.ptr());
        for (std::size_t i = 0; i < segments.size(); ++i) {
            if (plain && i + kAhead < segments.size()) {
                // its address only: looking others up may run code that lets it go
                PyObject* number = PyTuple_GET_ITEM(segments[i + kAhead], 0);
                const PyObject* next = PyDict_GetItemWithError(trajectories.ptr(), number);
                if (next == nullptr) PyErr_Clear();
                if (next != nullptr) ask_for(next, 192);
            }
            PyObject* number = PyTuple_GET_ITEM(segments[i], 0);
            const auto trajectory = py::reinterpret_steal<py::object>(PyObject_GetItem(trajectories.ptr(), number));
            if (!trajectory) throw py::error_already_set();
            PyObject* record = PyObject_GetAttr(trajectory.ptr(), attribute.ptr());
            if (record == nullptr) throw py::error_already_set();
            PyTuple_SET_ITEM(kept_.ptr(), static_cast<Py_ssize_t>(i), record);
            ask_for(record, 1);
        }
    }

    void check(const std::vector<PyObject*>& segments) {
        py::detail::make_caster<PyRecord> caster;  // made once: it looks its type up
        records_.reserve(segments.size());
        segments_.reserve(segments.size());
        for (std::size_t i = 0; i < segments.size(); ++i) {
            PyObject* object = PyTuple_GET_ITEM(kept_.ptr(), static_cast<Py_ssize_t>(i));
            if (object == Py_None || !caster.load(object, false)) throw py::type_error("not a TrajectoryRecord");
            const shmstage::Record& record = py::detail::cast_op<PyRecord&>(caster).record();
            records_.push_back(&record);
            ask_for(&record, sizeof record);
        }
        std::uint64_t number = 0;
        std::size_t i = 0;
        for (const py::handle row : rows_) {
            for (Py_ssize_t left = PyTuple_GET_SIZE(row.ptr()); left != 0; --left, ++i) {
                const std::uint64_t start = whole(PyTuple_GET_ITEM(segments[i], 1));
                const std::uint64_t length = whole(PyTuple_GET_ITEM(segments[i], 2));
                check_record(*records_[i], length);
                segments_.push_back({number, start, length});
            }
            ++number;
        }
    }

    void check_record(const shmstage::Record& record, std::uint64_t length) {
        if (record.tokens != length) {
            throw py::value_error("a record of " + std::to_string(record.tokens) + " tokens for a segment of " +
                                  std::to_string(length));
        }
        if (record.begin != 0) throw py::value_error("a record that begins at token " + std::to_string(record.begin));
        kind_.add(record);
    }

    static std::uint64_t whole(PyObject* object) {
        const unsigned long long value = PyLong_AsUnsignedLongLong(object);
        if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
        return value;
    }

    py::tuple rows_;
    py::tuple kept_;  ///< the records, as Python has them
    std::vector<const shmstage::Record*> records_;
    std::vector<shmstage::Segment> segments_;
    shmstage::Totals totals_{0, 0, 0};
    Kind kind_;
};

/// destination, number of the field in the records, padding byte
using WordArguments = std::tuple<py::object, std::size_t, unsigned char>;
/// encoding, layers, top_k, bits, ids, validity, offsets
using RoutingArguments =
    std::tuple<std::string, std::uint64_t, std::uint64_t, unsigned, py::object, py::object, py::object>;
/// What a fill writes to while it runs; a deque never moves a Buffer.
using Written = std::deque<Buffer>;

/// A field of words to be written, checked.
struct WordFill {
    std::byte* destination;
    std::size_t number;
    unsigned char pad;
};

WordFill word_fill(const WordArguments& arguments, std::uint64_t places, const Kind& kind, Written& written) {
    const auto& [destination, number, pad] = arguments;
    const Buffer& into = written.emplace_back(destination, true);
    check_nbytes("destination", into.nbytes(), product(places, shmstage::kWordNbytes));
    if (number >= shmstage::kMostFields) throw py::value_error("no such field: " + std::to_string(number));
    if (kind.first() != nullptr && (kind.first()->present >> number & 1U) == 0) {
        throw py::value_error("the records lack field " + std::to_string(number));
    }
    return {into.data(), number, pad};
}

/// Routing to be written, checked.
struct RoutingFill {
    std::string encoding;
    shmstage::RoutingShape shape;
    std::byte* ids;
    std::byte* validity;
    std::byte* offsets;
    std::uint64_t capacity;  ///< positions of a tile: real tokens, or rows x tokens where dense

    /// Of one tile among several that lie one after another.
    RoutingFill tile(std::uint64_t number, std::uint64_t rows) const {
        const bool packed = validity != nullptr;
        const std::uint64_t units = number * (capacity / (packed ? shmstage::kGroup : 1));
        RoutingFill one = *this;
        one.ids += units * (packed ? shape.group_nbytes() : shape.token_nbytes());
        if (packed) one.validity += units * shape.layers;
        one.offsets += number * (rows + 1) * sizeof(std::int32_t);
        return one;
    }
};

/// The width of packed ids, wherever there are any: held ones have the width of the destination's.
unsigned packed_bits(unsigned bits, const Kind& kind) {
    const unsigned held = kind.held_bits();
    if (held != 0 && bits != 0 && held != bits) {
        throw py::value_error("routing held in " + std::to_string(held) + " bits, want " + std::to_string(bits));
    }
    return bits != 0 ? bits : held;
}

/// How encoded routing is divided: `count` tiles of `rows` rows each.
struct Tiles {
    std::uint64_t count;
    std::uint64_t rows;
};

/// `places`: of a dense field.
RoutingFill routing_fill(const RoutingArguments& arguments, std::uint64_t places, const Tiles& tiles, const Kind& kind,
                         Written& written) {
    const auto& [encoding, layers, top_k, bits, ids, validity, offsets] = arguments;
    const bool packed = encoding == "ragged_packed";
    if (!packed && encoding != "ragged" && encoding != "dense") throw py::value_error("unknown encoding " + encoding);
    if (!packed && bits != 0) throw py::value_error("bits for ids that are not packed");
    const unsigned width = packed_bits(bits, kind);
    const shmstage::RoutingShape shape =
        packed ? packed_shape(layers, top_k, width) : routing_shape(layers, top_k, width);
    if (kind.first() != nullptr) {
        const shmstage::RoutingShape& given = kind.first()->shape;
        if (given.layers != layers || given.top_k != top_k) {
            throw py::value_error("routing of " + std::to_string(given.layers) + " layers and top-" +
                                  std::to_string(given.top_k) + ", want " + std::to_string(layers) + " and top-" +
                                  std::to_string(top_k));
        }
    }
    const Buffer& into = written.emplace_back(ids, true);
    RoutingFill fill{encoding, shape, into.data(), nullptr, nullptr, places};
    if (encoding == "dense") {
        check_nbytes("routing", into.nbytes(), product(places, shape.token_nbytes()));
    } else {
        const std::uint64_t unit = product(tiles.count, packed ? shape.group_nbytes() : shape.token_nbytes());
        if (into.nbytes() % unit != 0) throw py::value_error("routing is not a whole number of tokens");
        fill.capacity = into.nbytes() / unit * (packed ? shmstage::kGroup : 1);
        const Buffer& into_offsets = written.emplace_back(offsets, true);
        check_nbytes("offsets", into_offsets.nbytes(),
                     product(tiles.count, product(tiles.rows + 1, sizeof(std::int32_t))));
        fill.offsets = into_offsets.data();
    }
    if (packed) {
        const Buffer& into_validity = written.emplace_back(validity, true);
        check_nbytes("validity", into_validity.nbytes(),
                     product(tiles.count, product(fill.capacity / shmstage::kGroup, shape.layers)));
        fill.validity = into_validity.data();
    }
    return fill;
}

/// Offsets are int32.
void check_capacity(const RoutingFill& fill, std::uint64_t real) {
    if (fill.offsets == nullptr) return;
    if (real > fill.capacity) {
        throw py::value_error(std::to_string(real) + " real tokens, capacity " + std::to_string(fill.capacity));
    }
    if (real > std::numeric_limits<std::int32_t>::max()) throw py::value_error("more than 2**31 - 1 real tokens");
}

void add_routing(shmstage::Work& work, const RoutingFill& fill, const std::vector<shmstage::RoutingSource>& sources,
                 const std::vector<shmstage::Span>& padded, const std::vector<shmstage::Span>& compact) {
    if (fill.encoding == "ragged_packed") {
        work.add(fill.capacity / shmstage::kGroup, fill.shape.group_nbytes() + fill.shape.layers,
                 [&](const shmstage::Part& part) {
                     shmstage::fill_packed_routing({fill.ids, fill.validity}, fill.shape, sources, compact, part);
                 });
        return;
    }
    const std::vector<shmstage::Span>& spans = fill.encoding == "dense" ? padded : compact;
    work.add(fill.capacity, fill.shape.token_nbytes(), [&](const shmstage::Part& part) {
        shmstage::fill_dense_routing(fill.ids, fill.shape, sources, spans, part);
    });
}

void fill_microbatch(const Gathered& gathered, std::uint64_t tokens, const py::object& segment_ids,
                     const py::object& segment_positions, const std::vector<WordArguments>& fields,
                     const std::optional<RoutingArguments>& routing, unsigned threads) {
    // positions and segment ids are int32
    if (tokens > std::numeric_limits<std::int32_t>::max()) throw py::value_error("more than 2**31 - 1 tokens a row");
    const std::vector<shmstage::Segment>& segments = gathered.segments();
    if (const char* fault = shmstage::segments_fault(segments, gathered.rows(), tokens)) throw py::value_error(fault);
    const std::uint64_t places = product(gathered.rows(), tokens);
    Written written;
    const Buffer& ids = written.emplace_back(segment_ids, true);
    const Buffer& positions = written.emplace_back(segment_positions, true);
    check_nbytes("segment_ids", ids.nbytes(), product(places, sizeof(std::int32_t)));
    check_nbytes("segment_positions", positions.nbytes(), product(places, sizeof(std::int32_t)));
    std::vector<WordFill> words;
    words.reserve(fields.size());
    for (const WordArguments& field : fields) words.push_back(word_fill(field, places, gathered.kind(), written));
    std::optional<RoutingFill> routed;
    if (routing) {
        routed = routing_fill(*routing, places, {1, gathered.rows()}, gathered.kind(), written);
        check_capacity(*routed, gathered.totals().tokens);
    }

    const py::gil_scoped_release released;
    const std::vector<shmstage::Span> padded = shmstage::padded_spans(segments, tokens);
    std::vector<shmstage::Span> compact;
    std::vector<shmstage::RoutingSource> sources;
    shmstage::Work work;
    const std::uint64_t word = sizeof(std::int32_t);
    work.add(places, word, [&](const shmstage::Part& part) { shmstage::fill_segment_ids(ids.data(), padded, part); });
    work.add(places, word,
             [&](const shmstage::Part& part) { shmstage::fill_segment_positions(positions.data(), padded, part); });
    std::vector<shmstage::SpanField> filled;
    filled.reserve(words.size());
    for (const WordFill& field : words) {
        filled.push_back({field.destination, shmstage::kWordNbytes, field.pad,
                          shmstage::words_of(gathered.records(), field.number)});
    }
    for (const shmstage::SpanField& field : filled) {
        work.add(places, field.token_nbytes,
                 [&](const shmstage::Part& part) { shmstage::fill_spans(field, padded, part); });
    }
    if (routed) {
        sources = shmstage::routing_of(gathered.records());
        compact = shmstage::compact_spans(segments);
        add_routing(work, *routed, sources, padded, compact);
        if (routed->offsets != nullptr) shmstage::fill_offsets(routed->offsets, segments, gathered.rows());
    }
    work.run(threads);
}

/// row_begin, row_end, token_begin, token_end
using RectangleArguments = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

shmstage::Rectangle rectangle_of(const RectangleArguments& window) {
    const auto& [row_begin, row_end, token_begin, token_end] = window;
    if (row_end <= row_begin || token_end <= token_begin) throw py::value_error("an empty window");
    if (std::max(row_end, token_end) > std::numeric_limits<std::int32_t>::max()) {
        throw py::value_error("more than 2**31 - 1 rows or tokens");
    }
    return {row_begin, row_end, token_begin, token_end};
}

/// A part of a plan: int64 [n, 5], of which row, start and length come first.
std::vector<shmstage::Segment> planned_segments(const py::object& plan, const shmstage::Rectangle& window) {
    constexpr std::size_t kColumns = 5;
    constexpr std::size_t kRowNbytes = kColumns * sizeof(std::int64_t);
    const Buffer buffer(plan, false);
    if (buffer.nbytes() % kRowNbytes != 0) throw py::value_error("a plan is int64 [n, 5]");
    std::vector<shmstage::Segment> segments(buffer.nbytes() / kRowNbytes);
    for (std::size_t i = 0; i < segments.size(); ++i) {
        // a negative number comes out far beyond every bound
        std::array<std::uint64_t, 3> numbers{};
        std::memcpy(numbers.data(), buffer.data() + i * kRowNbytes, sizeof numbers);
        segments[i] = {numbers[0], numbers[1], numbers[2]};
        if (segments[i].row < window.row_begin) throw py::value_error("row before the window");
    }
    constexpr std::uint64_t kMostTokens = std::numeric_limits<std::int32_t>::max();
    const char* fault = shmstage::segments_fault(segments, window.row_end, kMostTokens);
    if (fault != nullptr) throw py::value_error(fault);
    return segments;
}

/// The records of a window's segments in order; null for what has no token in it.
class WindowRecords {
  public:
    explicit WindowRecords(const py::sequence& given) : kept_(given) {
        records_.reserve(kept_.size());
        for (const py::handle object : kept_) {
            records_.push_back(object.is_none() ? nullptr : &py::cast<const PyRecord&>(object).record());
            if (records_.back() != nullptr) kind_.add(*records_.back());
        }
    }

    const std::vector<const shmstage::Record*>& records() const { return records_; }
    const Kind& kind() const { return kind_; }

  private:
    py::tuple kept_;
    std::vector<const shmstage::Record*> records_;
    Kind kind_;
};

/// A rectangle of encoded routing, filled by itself.
struct Tile {
    RoutingFill fill;
    std::vector<shmstage::Cut> cuts;
    std::vector<shmstage::RoutingSource> sources;
    std::vector<shmstage::Span> padded;
    std::vector<shmstage::Span> compact;
};

/// The tiles of a window, row of tiles by row of tiles; dense routing is one tile.
std::vector<Tile> tiles_of(const RoutingFill& fill, const shmstage::Rectangle& window, std::uint64_t rows,
                           std::uint64_t tokens, const std::vector<shmstage::Segment>& segments) {
    std::vector<Tile> tiles;
    for (std::uint64_t row = window.row_begin; row < window.row_end; row += rows) {
        for (std::uint64_t token = window.token_begin; token < window.token_end; token += tokens) {
            const bool dense = fill.offsets == nullptr;
            Tile tile{dense ? fill : fill.tile(tiles.size(), rows), {}, {}, {}, {}};
            tile.cuts = shmstage::cuts_of(segments, {row, row + rows, token, token + tokens});
            check_capacity(tile.fill, shmstage::tokens_of(tile.cuts));
            tiles.push_back(std::move(tile));
        }
    }
    return tiles;
}

/// Returns the real tokens in the window.
std::uint64_t fill_window(const py::object& plan, const py::sequence& given, const RectangleArguments& where,
                          const std::array<std::uint64_t, 2>& divided, const py::object& segment_ids,
                          const py::object& segment_positions, const std::vector<WordArguments>& fields,
                          const std::optional<RoutingArguments>& routing, unsigned threads) {
    const shmstage::Rectangle window = rectangle_of(where);
    const std::vector<shmstage::Segment> segments = planned_segments(plan, window);
    const WindowRecords gathered(given);
    if (gathered.records().size() != segments.size()) {
        throw py::value_error(std::to_string(gathered.records().size()) + " records for " +
                              std::to_string(segments.size()) + " segments");
    }
    const std::vector<shmstage::Cut> cuts = shmstage::cuts_of(segments, window);
    if (!shmstage::covered(cuts, gathered.records())) throw py::value_error("records lack tokens of the window");
    const std::uint64_t rows = window.row_end - window.row_begin;
    const std::uint64_t tokens = window.token_end - window.token_begin;
    const std::uint64_t places = product(rows, tokens);
    const auto [down, across] = divided;
    if (down == 0 || across == 0 || rows % down != 0 || tokens % across != 0) {
        throw py::value_error("the tiles do not divide the window");
    }
    Written written;
    const Buffer& ids = written.emplace_back(segment_ids, true);
    const Buffer& positions = written.emplace_back(segment_positions, true);
    check_nbytes("segment_ids", ids.nbytes(), product(places, sizeof(std::int32_t)));
    check_nbytes("segment_positions", positions.nbytes(), product(places, sizeof(std::int32_t)));
    std::vector<WordFill> words;
    words.reserve(fields.size());
    for (const WordArguments& field : fields) words.push_back(word_fill(field, places, gathered.kind(), written));
    std::vector<Tile> tiles;
    if (routing) {
        const Tiles divisions{product(down, across), rows / down};
        const RoutingFill fill = routing_fill(*routing, places, divisions, gathered.kind(), written);
        if (fill.offsets == nullptr && divisions.count != 1) throw py::value_error("dense routing has no tiles");
        tiles = tiles_of(fill, window, divisions.rows, tokens / across, segments);
    }

    const py::gil_scoped_release released;
    const std::vector<shmstage::Span> padded = shmstage::padded_spans(cuts, tokens);
    shmstage::Work work;
    const std::uint64_t word = sizeof(std::int32_t);
    work.add(places, word, [&](const shmstage::Part& part) { shmstage::fill_segment_ids(ids.data(), padded, part); });
    work.add(places, word,
             [&](const shmstage::Part& part) { shmstage::fill_segment_positions(positions.data(), padded, part); });
    std::vector<shmstage::SpanField> filled;
    filled.reserve(words.size());
    for (const WordFill& field : words) {
        filled.push_back({field.destination, shmstage::kWordNbytes, field.pad,
                          shmstage::words_of(cuts, gathered.records(), field.number)});
    }
    for (const shmstage::SpanField& field : filled) {
        work.add(places, field.token_nbytes,
                 [&](const shmstage::Part& part) { shmstage::fill_spans(field, padded, part); });
    }
    for (Tile& tile : tiles) {
        tile.sources = shmstage::routing_of(tile.cuts, gathered.records());
        tile.padded = shmstage::padded_spans(tile.cuts, tokens);
        tile.compact = shmstage::compact_spans(tile.cuts);
        add_routing(work, tile.fill, tile.sources, tile.padded, tile.compact);
        if (tile.fill.offsets != nullptr) {
            shmstage::fill_offsets(tile.fill.offsets, shmstage::places_of(tile.cuts), rows / down);
        }
    }
    work.run(threads);
    return shmstage::tokens_of(cuts);
}

py::bytes pack_routing(const py::object& routing, std::uint64_t layers, std::uint64_t top_k, unsigned bits) {
    const shmstage::RoutingShape shape = packed_shape(layers, top_k, bits);
    const Buffer dense(routing, false);
    if (dense.nbytes() % shape.token_nbytes() != 0) throw py::value_error("routing is not a whole number of tokens");
    const std::uint64_t tokens = dense.nbytes() / shape.token_nbytes();
    const std::uint64_t nbytes = checked_held_nbytes(shape, tokens);
    py::bytes out(nullptr, nbytes);  // bytes not shown to anybody may still be written
    auto* into = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(out.ptr()));
    const py::gil_scoped_release released;
    shmstage::pack_routing(into, dense.data(), tokens, shape);
    return out;
}

void unpack_routing(const py::object& destination, const py::object& packed, std::uint64_t layers, std::uint64_t top_k,
                    unsigned bits) {
    const shmstage::RoutingShape shape = packed_shape(layers, top_k, bits);
    const Buffer into(destination, true);
    const Buffer from(packed, false);
    if (into.nbytes() % shape.token_nbytes() != 0) throw py::value_error("routing is not a whole number of tokens");
    const std::uint64_t tokens = into.nbytes() / shape.token_nbytes();
    check_nbytes("held routing", from.nbytes(), checked_held_nbytes(shape, tokens));
    const py::gil_scoped_release released;
    shmstage::unpack_routing(into.data(), from.data(), tokens, shape);
}

void bind_records(py::module_& module) {
    module.attr("MAX_WORD_FIELDS") = shmstage::kMostFields;
    py::class_<PyRecord>(module, "TrajectoryRecord",
                         "What a fill needs of one trajectory, noted once; holds the arrays.\n\n"
                         "words: per field None or `tokens` 4-byte words. routing: (array, tokens, layers, top_k, bits);\n"
                         "bits 0: int16 [tokens, layers, top_k], else what pack_routing made. begin: of a part of a\n"
                         "trajectory, its first token; what is packed then has all of that token's group of 8.\n"
                         "ValueError if a size does not fit.")
        .def(py::init<std::uint64_t, const py::sequence&, const std::optional<HeldRouting>&, std::uint64_t,
                      std::uint32_t, std::uint64_t>(),
             py::arg("tokens"), py::arg("words"), py::arg("routing") = py::none(), py::arg("loss_tokens") = 0,
             py::arg("experts") = 0, py::arg("begin") = 0);
    py::class_<Gathered>(module, "Gathered",
                         "The records of a micro-batch, one per segment; holds them.\n\n"
                         "rows: per row a tuple of segments (number, start, length). trajectories: number to what has\n"
                         "the record as its attribute `record`. ValueError if a record has another length than its\n"
                         "segment, or other fields, routing or experts than the first.")
        .def(py::init<const py::sequence&, const py::object&>(), py::arg("rows"), py::arg("trajectories"))
        .def_property_readonly("tokens", [](const Gathered& self) { return self.totals().tokens; })
        .def_property_readonly("loss_tokens", [](const Gathered& self) { return self.totals().loss_tokens; })
        .def_property_readonly("trained", [](const Gathered& self) { return self.totals().trained; },
                               "Records with a loss token.")
        .def_property_readonly("held_bits", [](const Gathered& self) { return self.kind().held_bits(); },
                               "Bits of ids that are held packed; 0: none are.");
}

void bind_fill(py::module_& module) {
    bind_records(module);
    module.def("fill_microbatch", &fill_microbatch, py::arg("gathered"), py::arg("tokens"), py::arg("segment_ids"),
               py::arg("segment_positions"), py::arg("fields"), py::arg("routing") = py::none(), py::arg("threads") = 0,
               "Writes every byte of the packed fields, GIL released.\n\n"
               "fields: (destination, number in the records' words, padding byte). routing: (encoding, layers, top_k,\n"
               "bits, ids, validity, offsets), encoding dense, ragged or ragged_packed, the three destinations as\n"
               "packing/routing.py has them (None where the encoding lacks one), bits 0 unless packed. threads: 0 =\n"
               "by cores and size. ValueError, before anything is written, if a size, a segment or the capacity does\n"
               "not fit.");
    module.def("fill_window", &fill_window, py::arg("plan"), py::arg("records"), py::arg("window"), py::arg("tiles"),
               py::arg("segment_ids"), py::arg("segment_positions"), py::arg("fields"),
               py::arg("routing") = py::none(), py::arg("threads") = 0,
               "As fill_microbatch, a window of it: (row_begin, row_end, token_begin, token_end). Returns the real\n"
               "tokens in it.\n\n"
               "plan: int64 [n, 5], row, start and length of every segment in the window's rows, in order; the other\n"
               "two are not read. records: for each of them a record that has its tokens in the window, or None\n"
               "where it has none. tiles: how often the window is divided, (down, across); routing that is not dense\n"
               "lies tile by tile, each by itself.");
    module.def("pack_routing", &pack_routing, py::arg("routing"), py::arg("layers"), py::arg("top_k"), py::arg("bits"),
               "Dense int16 [tokens, layers, top_k] as a waiting trajectory keeps it: packed groups of 8 tokens,\n"
               "uint8 [groups, layers, top_k, bits], then their validity [groups, layers]. Ids must be below 2**bits.");
    module.def("unpack_routing", &unpack_routing, py::arg("destination"), py::arg("held"), py::arg("layers"),
               py::arg("top_k"), py::arg("bits"),
               "What pack_routing made, back into int16 [tokens, layers, top_k].");
    module.def(
        "routing_fault",
        [](const py::object& routing, std::uint64_t top_k, std::int32_t experts) {
            const Buffer buffer(routing, false);
            const std::uint64_t choice_nbytes = product(top_k, sizeof(std::int16_t));
            if (choice_nbytes == 0 || buffer.nbytes() % choice_nbytes != 0 || experts < 0) {
                throw py::value_error("routing is not a whole number of choices");
            }
            const py::gil_scoped_release released;
            return shmstage::routing_fault(buffer.data(), buffer.nbytes() / choice_nbytes, top_k, experts);
        },
        py::arg("routing"), py::arg("top_k"), py::arg("experts"),
        "First choice of top_k int16 ids that is neither all -1 nor distinct ids in [0, experts); -1 if none.");
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native core of shmstage: slot atomics and waiting, copies, packing.";
    bind_memory(module);
    bind_fill(module);
    shmstage::bind_event_log(module);
}
