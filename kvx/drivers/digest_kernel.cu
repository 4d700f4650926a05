// Digests of content where it lies, as digester.py defines them: one warp for each TOKENS tokens of a head. Its lanes
// share the 16-byte parts of all layers, and add their sums up in the end. After a change, make the PTX anew:
//   nvcc -arch=compute_75 -ptx -o kvx/drivers/digest_kernel.ptx kvx/drivers/digest_kernel.cu
//   sed -i 's/^\.version .*/.version 6.4/' kvx/drivers/digest_kernel.ptx   (what sm_75 needs: older drivers take it too)
typedef unsigned long long u64;

constexpr int TOKENS = 4;

// One layer group; the same fields as `_Field` in cuda_digester.py. `layers` [L] and `tokens` [n] are where addresses
// and offsets lie, `keys` [1 + words][2], `output` [H][n][2]. Its warps are numbered from `first_warp`.
struct Group {
    u64 layers, tokens, keys, output;
    u64 num_layers, num_tokens, num_heads, head_stride, content_bytes, is_aligned, first_warp;
};

struct __align__(16) Pair {
    u64 first, second;
};

struct Place {
    unsigned group, head, token;
};

struct Sums {
    u64 straight[TOKENS], turned[TOKENS];
};

__device__ u64 turned_round(u64 word) {
    const u64 low = __byte_perm(static_cast<unsigned>(word >> 32), 0, 0x0123);
    return static_cast<u64>(__byte_perm(static_cast<unsigned>(word), 0, 0x0123)) << 32 | low;
}

// 16 bytes, of which `nbytes` are content; the others are not read. Aligned content is whole.
template <bool ALIGNED> __device__ Pair load(u64 address, unsigned nbytes) {
    if (ALIGNED) {
        const ulonglong2 found = __ldcs(reinterpret_cast<const ulonglong2 *>(address));
        return {found.x, found.y};
    }
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(address);
    Pair found = {0, 0};
#pragma unroll 1
    for (unsigned i = 0; i < nbytes && i < 8; ++i) found.first |= static_cast<u64>(bytes[i]) << 8 * i;
#pragma unroll 1
    for (unsigned i = 8; i < nbytes; ++i) found.second |= static_cast<u64>(bytes[i]) << 8 * (i - 8);
    return found;
}

// What a warp works on; neighbours take the heads of the same tokens, which lie together in token-major layouts.
__device__ Place place_of(const Group *groups, unsigned num_groups, unsigned warp) {
    unsigned index = num_groups - 1;
    while (groups[index].first_warp > warp) --index;
    const unsigned number = warp - static_cast<unsigned>(groups[index].first_warp);
    const unsigned heads = static_cast<unsigned>(groups[index].num_heads);
    return {index, number % heads, number / heads * TOKENS};
}

// One lane's part of the sums.
template <bool ALIGNED> __device__ Sums part_of(const Group &group, const Place &place, unsigned lane) {
    const u64 *layers = reinterpret_cast<const u64 *>(group.layers);
    const u64 *tokens = reinterpret_cast<const u64 *>(group.tokens);
    const Pair *keys = reinterpret_cast<const Pair *>(group.keys) + 1;
    const unsigned num_layers = static_cast<unsigned>(group.num_layers);
    const unsigned content = static_cast<unsigned>(group.content_bytes), parts = (content + 15) / 16;
    const unsigned last = static_cast<unsigned>(group.num_tokens) - 1;
    u64 offsets[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const unsigned token = place.token + t < last ? place.token + t : last;  // too many: the last one again
        offsets[t] = tokens[token] + place.head * group.head_stride;
    }
    Sums sums = {};
    unsigned layer = lane / parts, part = lane % parts;
    while (layer < num_layers) {
        const u64 at = layers[layer] + part * 16;
        const unsigned left = content - part * 16, nbytes = left < 16 ? left : 16;
        const Pair *key = keys + 2 * (static_cast<u64>(layer) * parts + part);
        const Pair first_key = key[0], second_key = key[1];
        Pair words[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) words[t] = load<ALIGNED>(at + offsets[t], nbytes);  // all on their way at once
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            sums.straight[t] += first_key.first * words[t].first + second_key.first * words[t].second;
            sums.turned[t] += first_key.second * turned_round(words[t].first);
            sums.turned[t] += second_key.second * turned_round(words[t].second);
        }
        for (part += 32; part >= parts; part -= parts) ++layer;
    }
    return sums;
}

// The digest of token `place.token + t`, from the sums of all lanes.
__device__ void write(const Group &group, const Place &place, unsigned t, u64 straight, u64 turned) {
    if (place.token + t >= group.num_tokens) return;
    const Pair first_key = *reinterpret_cast<const Pair *>(group.keys);
    Pair *output = reinterpret_cast<Pair *>(group.output) + place.head * group.num_tokens;
    output[place.token + t] = {first_key.first + straight, first_key.second + turned};
}

extern "C" __global__ void __launch_bounds__(128) kvx_digest(const Group *groups, unsigned num_groups) {
    const unsigned lane = threadIdx.x % 32;
    const Place place = place_of(groups, num_groups, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    const Group group = groups[place.group];
    if (place.token >= group.num_tokens) return;  // the last block of threads has warps too many
    Sums sums = group.is_aligned ? part_of<true>(group, place, lane) : part_of<false>(group, place, lane);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            sums.straight[t] += __shfl_xor_sync(0xffffffffu, sums.straight[t], step);
            sums.turned[t] += __shfl_xor_sync(0xffffffffu, sums.turned[t], step);
        }
        if (lane == t) write(group, place, t, sums.straight[t], sums.turned[t]);
    }
}
