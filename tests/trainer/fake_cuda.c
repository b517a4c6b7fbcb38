/* Stands for libcuda.so.1 in tests of the ctypes door: the same names, prototypes and refusals, and a log of calls. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 16];
static int initialised, retained, current;
static struct { uintptr_t begin, end; } ranges[64];
static int count;

#define NOTE(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)

const char *fake_log(void) { return text; }

int cuInit(unsigned flags) { initialised = 1; NOTE("init %u\n", flags); return 0; }

int cuDeviceGet(int *device, int ordinal) {
    if (!initialised) return 3;
    if (ordinal > 3) return 101;
    *device = 40 + ordinal; /* a handle, not the ordinal */
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    retained++;
    *context = (void *)(uintptr_t)(0x7f0000000000ull + (unsigned)device); /* does not fit an int */
    NOTE("retain %d\n", device);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) { retained--; NOTE("release %d\n", device); return 0; }

int cuCtxPushCurrent_v2(void *context) {
    if ((uintptr_t)context < 0x7f0000000000ull) return 201;
    current++;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) { if (!context || !current) return 201; current--; return 0; }

int cuMemHostRegister_v2(void *p, size_t nbytes, unsigned flags) {
    uintptr_t begin = (uintptr_t)p;
    if (!current) return 201;
    if (!nbytes || begin % 4096 || nbytes % 4096 || count == 64) return 1;
    if ((flags & 8) && getenv("FAKE_CUDA_WITHOUT_READ_ONLY")) return 801;
    for (int i = 0; i < count; i++)
        if (begin < ranges[i].end && ranges[i].begin < begin + nbytes) return 712;
    ranges[count].begin = begin;
    ranges[count++].end = begin + nbytes;
    NOTE("register %#zx %zu %u\n", (size_t)begin, nbytes, flags);
    return 0;
}

int cuMemHostUnregister(void *p) {
    if (!current) return 201;
    for (int i = 0; i < count; i++)
        if (ranges[i].begin == (uintptr_t)p) {
            ranges[i] = ranges[--count];
            NOTE("unregister %#zx\n", (size_t)p);
            return 0;
        }
    return 713;
}

int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case 1: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case 101: *name = "CUDA_ERROR_INVALID_DEVICE"; return 0;
    case 712: *name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"; return 0;
    case 713: *name = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"; return 0;
    case 801: *name = "CUDA_ERROR_NOT_SUPPORTED"; return 0;
    default: *name = NULL; return 1;
    }
}
