// Work on pages that stays on a GPU. Each kernel does what a NumPy function of this package does (named above it), bit
// for bit, and is tested against it.
//
// One source for three compilers: NVRTC when it runs, nvcc or NVRTC in the tests, and a C++ compiler that has a few
// lines of its own for the words below that are CUDA's (tests/kernels/host.cpp). So a thread never waits for another:
// no shared memory, no barriers, no warps, only atomics, and any grid of blocks gives the same result. A block has a
// power of two of threads, 32 at least.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ inline u64 thread_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ inline u64 thread_count() { return (u64)gridDim.x * blockDim.x; }

// --- pages.gather, pages.scatter ------------------------------------------------------------------------------------

// Words that a thread has on their way at once: what hides the latency of memory.
enum { WORDS_AT_ONCE = 4 };

// Copy page source_ids[i] to page target_ids[i] for all i below page_count; no ids: page i. Strides in bytes. Groups of
// 2^lane_bits threads (not more than a block has) take tiles of one page each, so that pages of any size keep all of
// them busy, and adjacent pages are read as one run.
template <typename Word>
static __device__ void copy_pages(const u8 *source, u64 source_stride, const u64 *source_ids, u8 *target,
                                  u64 target_stride, const u64 *target_ids, u64 page_count, u64 page_words,
                                  u32 lane_bits) {
    const u64 lanes = (u64)1 << lane_bits;
    const u64 lane = thread_index() & (lanes - 1);
    const u64 tile_words = lanes * WORDS_AT_ONCE;
    const u64 tiles = (page_words + tile_words - 1) / tile_words;
    for (u64 tile = thread_index() >> lane_bits; tile < page_count * tiles; tile += thread_count() >> lane_bits) {
        const u64 page = tile / tiles;
        const u64 first = (tile - page * tiles) * tile_words + lane;
        const Word *from = (const Word *)(source + (source_ids ? source_ids[page] : page) * source_stride);
        Word *to = (Word *)(target + (target_ids ? target_ids[page] : page) * target_stride);
        Word held[WORDS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < WORDS_AT_ONCE; i++)
            if (first + i * lanes < page_words) held[i] = from[first + i * lanes];
#pragma unroll
        for (int i = 0; i < WORDS_AT_ONCE; i++)
            if (first + i * lanes < page_words) to[first + i * lanes] = held[i];
    }
}

#define COPY_PAGES(bytes, Word)                                                                                       \
    extern "C" __global__ void copy_pages_##bytes(const u8 *source, u64 source_stride, const u64 *source_ids,         \
                                                  u8 *target, u64 target_stride, const u64 *target_ids,               \
                                                  u64 page_count, u64 page_words, u32 lane_bits) {                    \
        copy_pages<Word>(source, source_stride, source_ids, target, target_stride, target_ids, page_count,            \
                         page_words, lane_bits);                                                                      \
    }
COPY_PAGES(16, uint4)
COPY_PAGES(8, u64)
COPY_PAGES(4, u32)
COPY_PAGES(1, u8)

// --- validate.check_structure, pages.check_compact --------------------------------------------------------------------

// The order in which the host looks, and so which of several violations is told: validate.INDEX_RULES.
enum { V1, V3, V2, V4, V6, COMPACT };

// The status word is the least of all violations: the rule above, and the first index that breaks it below.
static __device__ inline void refuse(u64 *status, u64 rule, u64 index) { atomicMin(status, rule << 56 | index); }

// V1-V4 and V6. seq_ptr [num_seqs + 1], token_counts [num_seqs], block_table [entry_count]; status begins as all ones.
template <typename Index>
static __device__ void check_index(const Index *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                   const Index *block_table, u64 entry_count, u64 num_pages, u64 page_size,
                                   u64 *status) {
    const u64 end = entry_count > num_seqs ? entry_count : num_seqs + 1;
    for (u64 i = thread_index(); i < end; i += thread_count()) {
        if (i == 0 && seq_ptr[0] != 0) refuse(status, V1, 0);
        if (i < num_seqs) {
            const u64 first = seq_ptr[i], next = seq_ptr[i + 1];
            if (next < first) refuse(status, V3, i + 1);
            const u64 needed = token_counts[i] / page_size + (token_counts[i] % page_size != 0);
            if (needed > next - first) refuse(status, V6, i);
        }
        if (i == num_seqs && seq_ptr[i] != entry_count) refuse(status, V2, i);
        if (i < entry_count && block_table[i] >= num_pages) refuse(status, V4, i);
    }
}

extern "C" __global__ void check_index_4(const u32 *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                         const u32 *block_table, u64 entry_count, u64 num_pages, u64 page_size,
                                         u64 *status) {
    check_index<u32>(seq_ptr, token_counts, num_seqs, block_table, entry_count, num_pages, page_size, status);
}
extern "C" __global__ void check_index_8(const u64 *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                         const u64 *block_table, u64 entry_count, u64 num_pages, u64 page_size,
                                         u64 *status) {
    check_index<u64>(seq_ptr, token_counts, num_seqs, block_table, entry_count, num_pages, page_size, status);
}

// The first entry that names each page, of a table that is in bounds; first [num_pages] begins as all ones.
template <typename Index>
static __device__ void first_use(const Index *block_table, u64 entry_count, u32 *first) {
    for (u64 i = thread_index(); i < entry_count; i += thread_count()) atomicMin(&first[block_table[i]], (u32)i);
}
extern "C" __global__ void first_use_4(const u32 *block_table, u64 entry_count, u32 *first) {
    first_use<u32>(block_table, entry_count, first);
}
extern "C" __global__ void first_use_8(const u64 *block_table, u64 entry_count, u32 *first) {
    first_use<u64>(block_table, entry_count, first);
}

// Every page is named, and in order of first use.
extern "C" __global__ void check_compact(const u32 *first, u64 num_pages, u64 *status) {
    for (u64 page = thread_index(); page < num_pages; page += thread_count())
        if (first[page] == 0xFFFFFFFFu || (page && first[page] <= first[page - 1])) refuse(status, COMPACT, page);
}

// --- pages.live_slots -------------------------------------------------------------------------------------------------

// Live slots of each page, of a structure that was checked; live [num_pages] begins as zeros. One thread an entry, which
// looks for its sequence: sequences are of any length.
template <typename Index>
static __device__ void live_slots(const Index *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                  const Index *block_table, u64 entry_count, u64 page_size, u32 *live) {
    for (u64 entry = thread_index(); entry < entry_count; entry += thread_count()) {
        u64 low = 0, high = num_seqs;  // the last that begins at the entry or before it: empty ones end there, too
        while (high - low > 1) {
            const u64 middle = low + (high - low) / 2;
            if (seq_ptr[middle] <= entry)
                low = middle;
            else
                high = middle;
        }
        const u64 before = (entry - seq_ptr[low]) * page_size;
        if (token_counts[low] > before) {
            const u64 left = token_counts[low] - before;
            atomicMax(&live[block_table[entry]], (u32)(left < page_size ? left : page_size));
        }
    }
}
extern "C" __global__ void live_slots_4(const u32 *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                        const u32 *block_table, u64 entry_count, u64 page_size, u32 *live) {
    live_slots<u32>(seq_ptr, token_counts, num_seqs, block_table, entry_count, page_size, live);
}
extern "C" __global__ void live_slots_8(const u64 *seq_ptr, const u64 *token_counts, u64 num_seqs,
                                        const u64 *block_table, u64 entry_count, u64 page_size, u32 *live) {
    live_slots<u64>(seq_ptr, token_counts, num_seqs, block_table, entry_count, page_size, live);
}

// --- pages.scrub, pages.clear_dead, pages.scrub_parameters ------------------------------------------------------------

// Count a slot that was not clear, once: seen has a bit for each slot. No seen: nobody counts.
static __device__ inline void note_dirty(u64 slot, u32 *seen, u64 *dirty) {
    if (!seen) return;
    const u32 bit = 1u << (slot & 31);
    if (!(atomicOr(&seen[slot >> 5], bit) & bit)) atomicAdd(dirty, (u64)1);
}

static __device__ inline bool differs(u64 word, u64 clear) { return word != clear; }
static __device__ inline bool differs(u32 word, u32 clear) { return word != clear; }
static __device__ inline bool differs(u8 word, u8 clear) { return word != clear; }
static __device__ inline bool differs(const uint4 &word, const uint4 &clear) {
    return word.x != clear.x || word.y != clear.y || word.z != clear.z || word.w != clear.w;
}

static __device__ inline void spread(u8 byte, u8 &word) { word = byte; }
static __device__ inline void spread(u8 byte, u32 &word) { word = byte * 0x01010101u; }
static __device__ inline void spread(u8 byte, u64 &word) { word = byte * 0x0101010101010101ull; }
static __device__ inline void spread(u8 byte, uint4 &word) { word.x = word.y = word.z = word.w = byte * 0x01010101u; }

// Clear the dead slots of page_count whole pages of slots of whole words. 2^lane_bits threads take a page. Reads live
// and the dead slots, writes what is not clear.
template <typename Word>
static __device__ void scrub_slots(Word *pool, const u32 *live, u64 page_count, u64 page_size, u64 slot_words,
                                   u32 clear_byte, u32 lane_bits, u32 *seen, u64 *dirty) {
    Word clear;
    spread((u8)clear_byte, clear);
    const u64 lanes = (u64)1 << lane_bits;
    const u64 lane = thread_index() & (lanes - 1);
    for (u64 page = thread_index() >> lane_bits; page < page_count; page += thread_count() >> lane_bits) {
        const u64 first = page * page_size + live[page];
        const u64 end = (page + 1) * page_size;
        if (first >= end) continue;
        for (u64 word = first * slot_words + lane; word < end * slot_words; word += lanes)
            if (differs(pool[word], clear)) {
                pool[word] = clear;
                note_dirty(word / slot_words, seen, dirty);
            }
    }
}

#define SCRUB_SLOTS(bytes, Word)                                                                                      \
    extern "C" __global__ void scrub_slots_##bytes(Word *pool, const u32 *live, u64 page_count, u64 page_size,        \
                                                   u64 slot_words, u32 clear_byte, u32 lane_bits, u32 *seen,          \
                                                   u64 *dirty) {                                                      \
        scrub_slots<Word>(pool, live, page_count, page_size, slot_words, clear_byte, lane_bits, seen, dirty);         \
    }
SCRUB_SLOTS(16, uint4)
SCRUB_SLOTS(8, u64)
SCRUB_SLOTS(4, u32)
SCRUB_SLOTS(1, u8)

// The same for slots that are no whole bytes, of pages that may be none either: a byte has one thread, whatever slots
// share it. slot_count slots of slot_bits bits from bit 0 on; what lies behind them stays.
extern "C" __global__ void scrub_bits(u8 *pool, const u32 *live, u64 slot_count, u64 page_size, u64 slot_bits,
                                      u32 *seen, u64 *dirty) {
    const u64 bytes = (slot_count * slot_bits + 7) / 8;
    for (u64 byte = thread_index(); byte < bytes; byte += thread_count()) {
        u32 cleared = 0;
        for (u64 slot = 8 * byte / slot_bits; slot < slot_count && slot * slot_bits < 8 * byte + 8; slot++) {
            if (slot % page_size < live[slot / page_size]) continue;
            const u64 begin = slot * slot_bits, end = begin + slot_bits;
            const u32 low = begin > 8 * byte ? (u32)(begin - 8 * byte) : 0;
            const u32 high = end < 8 * byte + 8 ? (u32)(end - 8 * byte) : 8;
            const u32 bits = (1u << high) - (1u << low);
            if (pool[byte] & bits) note_dirty(slot, seen, dirty);
            cleared |= bits;
        }
        if (pool[byte] & cleared) pool[byte] = (u8)(pool[byte] & ~cleared);
    }
}

// Parameters of slots: those of dead ones become `clear`.
template <typename Word>
static __device__ void scrub_entries(Word *entries, const u32 *live, u64 slot_count, u64 page_size, u32 clear,
                                     u32 *seen, u64 *dirty) {
    for (u64 slot = thread_index(); slot < slot_count; slot += thread_count())
        if (slot % page_size >= live[slot / page_size] && entries[slot] != (Word)clear) {
            entries[slot] = (Word)clear;
            note_dirty(slot, seen, dirty);
        }
}
extern "C" __global__ void scrub_entries_2(u16 *entries, const u32 *live, u64 slot_count, u64 page_size, u32 clear,
                                           u32 *seen, u64 *dirty) {
    scrub_entries<u16>(entries, live, slot_count, page_size, clear, seen, dirty);
}
extern "C" __global__ void scrub_entries_4(u32 *entries, const u32 *live, u64 slot_count, u64 page_size, u32 clear,
                                           u32 *seen, u64 *dirty) {
    scrub_entries<u32>(entries, live, slot_count, page_size, clear, seen, dirty);
}

// --- checksum.mix64 ---------------------------------------------------------------------------------------------------

static __device__ inline u64 mix(u64 word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    return word ^ word >> 31;
}

// Each thread's share of the sum of all words, mixed with their places: sums [threads of the grid]. data is at a multiple
// of 16; the last word is filled up with zeros.
extern "C" __global__ void mix64_sums(const u8 *data, u64 nbytes, u64 *sums) {
    const u64 step = 0x9E3779B97F4A7C15ull;
    const ulonglong2 *pairs = (const ulonglong2 *)data;
    u64 sum = 0;
    for (u64 i = thread_index(); i < nbytes / 16; i += thread_count()) {
        const ulonglong2 pair = pairs[i];
        sum += mix(pair.x + (2 * i + 1) * step) + mix(pair.y + (2 * i + 2) * step);
    }
    if (thread_index() == 0)
        for (u64 start = nbytes / 16 * 16; start < nbytes; start += 8) {
            u64 word = 0;
            for (u64 i = start; i < nbytes && i < start + 8; i++) word |= (u64)data[i] << 8 * (i - start);
            sum += mix(word + (start / 8 + 1) * step);
        }
    sums[thread_index()] = sum;
}
