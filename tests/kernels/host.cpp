// The kernels as C++: what CUDA's words mean on one thread, and each kernel as a function of (grid, block, arguments).

#define __global__
#define __device__

struct Size {
    unsigned x;
};
static thread_local Size gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

template <typename T>
static T atomicMin(T *place, T value) {
    const T before = *place;
    if (value < before) *place = value;
    return before;
}
template <typename T>
static T atomicMax(T *place, T value) {
    const T before = *place;
    if (value > before) *place = value;
    return before;
}
template <typename T>
static T atomicOr(T *place, T value) {
    const T before = *place;
    *place = before | value;
    return before;
}
template <typename T>
static T atomicAdd(T *place, T value) {
    const T before = *place;
    *place = before + value;
    return before;
}

#include "kernels.cu"

template <auto kernel>
struct Launch;
template <typename... Parameters, void (*kernel)(Parameters...)>
struct Launch<kernel> {
    // The last thread first: whoever counts on an order is found out.
    static void run(unsigned grid, unsigned block, Parameters... arguments) {
        gridDim.x = grid;
        blockDim.x = block;
        for (blockIdx.x = grid; blockIdx.x-- > 0;)
            for (threadIdx.x = block; threadIdx.x-- > 0;) kernel(arguments...);
    }
};

#define HOST(name) extern "C" const decltype(&Launch<name>::run) host_##name = &Launch<name>::run;
HOST(copy_pages_16)
HOST(copy_pages_8)
HOST(copy_pages_4)
HOST(copy_pages_1)
HOST(check_index_4)
HOST(check_index_8)
HOST(first_use_4)
HOST(first_use_8)
HOST(check_compact)
HOST(live_slots_4)
HOST(live_slots_8)
HOST(scrub_slots_16)
HOST(scrub_slots_8)
HOST(scrub_slots_4)
HOST(scrub_slots_1)
HOST(scrub_bits)
HOST(scrub_entries_2)
HOST(scrub_entries_4)
HOST(mix64_sums)
