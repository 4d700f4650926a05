// The copy of many runs in one launch: one block of threads for each tile. After a change, make the PTX anew:
//   nvcc -arch=compute_75 -ptx -o kvx/drivers/copy_kernel.ptx kvx/drivers/copy_kernel.cu
//   sed -i 's/^\.version .*/.version 6.4/' kvx/drivers/copy_kernel.ptx     (what sm_75 needs: older drivers take it too)
struct Tile {
    unsigned long long destination, source, nbytes;
};

extern "C" __global__ void __launch_bounds__(512) kvx_copy(const Tile *tiles) {
    const Tile tile = tiles[blockIdx.x];
    if (((tile.destination | tile.source | tile.nbytes) & 15) == 0) {
        uint4 *to = reinterpret_cast<uint4 *>(tile.destination);
        const uint4 *from = reinterpret_cast<const uint4 *>(tile.source);
        const unsigned count = static_cast<unsigned>(tile.nbytes / 16), step = blockDim.x;
        unsigned i = threadIdx.x;
        // Four loads in flight for each thread before the first store: memory far away is slow to answer.
        for (; i + 3 * step < count; i += 4 * step) {
            const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
            to[i] = a;
            to[i + step] = b;
            to[i + 2 * step] = c;
            to[i + 3 * step] = d;
        }
        for (; i < count; i += step) to[i] = from[i];
    } else {
        unsigned char *to = reinterpret_cast<unsigned char *>(tile.destination);
        const unsigned char *from = reinterpret_cast<const unsigned char *>(tile.source);
        for (unsigned long long i = threadIdx.x; i < tile.nbytes; i += blockDim.x) to[i] = from[i];
    }
}
