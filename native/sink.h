// Writing memory from front to back, once, without reading it first. Call without the GIL.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shmstage {

/// Appends bytes at a destination. A streaming sink gathers them in a small buffer and writes whole cache lines past
/// the cache, which saves the read that an ordinary store of a missing line costs; it pays once the destination does
/// not fit into the cache. Nothing is certain to be written before finish().
class Sink {
  public:
    static constexpr std::size_t kRoom = 1024;  ///< the most that room() gives

    Sink(std::byte* destination, bool streaming) : at_(destination), streaming_(streaming) {
        if (!streaming_) return;
        held_ = reinterpret_cast<std::uintptr_t>(destination) % kLine;
        first_ = held_;
        at_ = destination - held_;
    }
    Sink(const Sink&) = delete;
    Sink& operator=(const Sink&) = delete;

    void copy(const std::byte* source, std::size_t nbytes) {
        if (nbytes == 0) return;
        if (!streaming_) {
            std::memcpy(at_, source, nbytes);
            at_ += nbytes;
            return;
        }
        if (nbytes >= kDirect) {
            const std::size_t head = (kLine - held_ % kLine) % kLine;
            gather(source, head);
            write_lines();
            const std::size_t direct = (nbytes - head) / kLine * kLine;
            stream(at_, source + head, direct);
            at_ += direct;
            source += head + direct;
            nbytes -= head + direct;
        }
        gather(source, nbytes);
    }

    void fill(unsigned char value, std::size_t nbytes) {
        if (nbytes == 0) return;
        if (!streaming_) {
            std::memset(at_, value, nbytes);
            at_ += nbytes;
            return;
        }
        if (nbytes >= kDirect) {
            const std::size_t head = (kLine - held_ % kLine) % kLine;
            gather(value, head);
            write_lines();
            const std::size_t direct = (nbytes - head) / kLine * kLine;
            stream_value(at_, value, direct);
            at_ += direct;
            nbytes -= head + direct;
        }
        gather(value, nbytes);
    }

    /// Where the next `nbytes`, at most kRoom, can be written; then commit() as many.
    std::byte* room(std::size_t nbytes) {
        if (!streaming_) return at_;
        if (gathered_.size() - held_ < nbytes) write_lines();
        return gathered_.data() + held_;
    }

    void commit(std::size_t nbytes) {
        if (streaming_) {
            held_ += nbytes;
        } else {
            at_ += nbytes;
        }
    }

    void finish() {
        if (!streaming_) return;
        write_lines();
        if (held_ > first_) std::memcpy(at_ + first_, gathered_.data() + first_, held_ - first_);
        first_ = held_;
#if defined(__SSE2__)
        _mm_sfence();  // streamed lines are ordered by nothing else: publishing comes after them
#endif
    }

  private:
    static constexpr std::size_t kLine = 64;
    static constexpr std::size_t kDirect = 1024;  ///< from here on a span does not go through the buffer
    static constexpr std::size_t kForeseen = 1024;  ///< the processor foresees nothing beyond a page's end

    void gather(const std::byte* source, std::size_t nbytes) {
        while (nbytes != 0) {
            if (held_ == gathered_.size()) write_lines();
            const std::size_t part = std::min(nbytes, gathered_.size() - held_);
            std::memcpy(gathered_.data() + held_, source, part);
            held_ += part;
            source += part;
            nbytes -= part;
        }
    }

    void gather(unsigned char value, std::size_t nbytes) {
        while (nbytes != 0) {
            if (held_ == gathered_.size()) write_lines();
            const std::size_t part = std::min(nbytes, gathered_.size() - held_);
            std::memset(gathered_.data() + held_, value, part);
            held_ += part;
            nbytes -= part;
        }
    }

    /// Writes the whole lines that are gathered and keeps the rest. The very first line may belong in part to others.
    void write_lines() {
        const std::size_t whole = held_ / kLine * kLine;
        if (whole == 0) return;
        std::size_t from = 0;
        if (first_ != 0) {
            std::memcpy(at_ + first_, gathered_.data() + first_, kLine - first_);
            from = kLine;
            first_ = 0;
        }
        stream(at_ + from, gathered_.data() + from, whole - from);
        std::memcpy(gathered_.data(), gathered_.data() + whole, held_ - whole);
        at_ += whole;
        held_ -= whole;
    }

    /// `destination` is at the begin of a line, `nbytes` whole lines.
    static void stream(std::byte* destination, const std::byte* source, std::size_t nbytes) {
#if defined(__SSE2__)
        for (std::size_t i = 0; i < nbytes; i += kLine) {
            const auto* from = reinterpret_cast<const __m128i*>(source + i);
            auto* to = reinterpret_cast<__m128i*>(destination + i);
            __builtin_prefetch(source + i + kForeseen);
            const __m128i a = _mm_loadu_si128(from);
            const __m128i b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2);
            const __m128i d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
#else
        if (nbytes != 0) std::memcpy(destination, source, nbytes);
#endif
    }

    static void stream_value(std::byte* destination, unsigned char value, std::size_t nbytes) {
#if defined(__SSE2__)
        const __m128i all = _mm_set1_epi8(static_cast<char>(value));
        for (std::size_t i = 0; i < nbytes; i += sizeof all) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(destination + i), all);
        }
#else
        if (nbytes != 0) std::memset(destination, value, nbytes);
#endif
    }

    alignas(kLine) std::array<std::byte, 4096> gathered_;  ///< stands for the bytes from at_ on
    std::byte* at_;                                        ///< streaming: begin of a line; else where to write next
    std::size_t held_ = 0;                                 ///< end of what is gathered
    std::size_t first_ = 0;                                ///< bytes before it, in the first line, are not ours
    bool streaming_;
};

}  // namespace shmstage
