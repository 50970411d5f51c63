// y[M, N] = x[M, K] @ W[N, K]^T for x and W in FP8 (e4m3) on Hopper. The tensor cores keep about fourteen bits of such
// sums, and scales may change along K, for every token and every 128 rows of W: so sums are taken out every FOLD steps
// of 32 columns, multiplied by a float32 scale and added up.
//
// Tokens are the tensor cores' 64 rows here (narrow.cu has it the other way round): a thread's 64 sums of a product
// then belong to two tokens and one block of W, and two scales do for them; with rows of W in their place it takes 34.
// A block makes 128 tokens, 64 for each of two warpgroups, times COLUMNS rows of W, in products of 128. Two blocks form
// a cluster and share the rows of W: each asks for half of them, and the copy engine hands it to both.
//
// The totals of 256 columns fill half of the registers, so there is one set of sums: a warpgroup that folds does not
// multiply, and whatever lies between the end of one product and the start of its next has to be filled by the other
// warpgroup. Hence threads that multiply read no global memory and compute few addresses there: a warp of its own
// brings the scales, already multiplied with each other, and the next stage is looked up while sums are folded.
//
// Definitions: COLUMNS (128, 256), STAGES, FOLD (2, 4), X_GROUPED, W_GROUPED (whether scales change along K), W_SCALE
// (0 bf16, 1 fp16, 2 fp32), Y_FP16.
typedef unsigned int u32;
typedef unsigned long long u64;
#define FLOAT8 1
#define TOKENS 128  // columns of a product
#include "async.cuh"
#include "wgmma.cuh"
#include "wgmma_many.cuh"
#include "cluster.cuh"
#include "bands.cuh"
#include "narrow.cuh"

#define ROWS 128
#define CHUNK 128  // columns of x and W, and their bytes
#define X_BYTES (ROWS * CHUNK)
#define STAGE_BYTES (X_BYTES + COLUMNS * CHUNK)
#define PARTS (COLUMNS / TOKENS)
#define GROUPS (4 / FOLD)  // of scales in a chunk
#define PRODUCTS (PARTS * GROUPS)
#define SCALED (X_GROUPED || W_GROUPED)
#define SCALE_BYTES (SCALED ? PRODUCTS * ROWS * 4 : 0)
#define WARP_BYTES 1024  // stored at once by a warp: 16 tokens by 32 columns, twice
#define WARPS 8
#define THREADS (32 * WARPS + 128)

struct Arguments {
  TensorMap x, w;  // boxes of ROWS rows, of half of COLUMNS
  const char *w_scale;  // [N >> w_shift, groups]
  const float *x_scale;  // [M, groups], without X_GROUPED [M]
  const unsigned short *bias;
  unsigned short *y;
  int M, N, chunks, pairs, tiles, groups, w_shift;
};

struct Place {
  int token0, row0;
};
__device__ __forceinline__ Place place(const Arguments &p, int tile, int rank) {
  return place_of<ROWS, COLUMNS, Place>(tile, p.pairs, p.tiles, rank);
}

// Shared memory, from an address aligned for the swizzles.
struct Memory {
  u32 base;
  __device__ __forceinline__ u32 x(u32 stage) const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 out(u32 warp, u32 turn) const { return x(STAGES) + (warp * 2 + turn) * WARP_BYTES; }
  __device__ __forceinline__ u32 scale(u32 stage) const { return out(WARPS, 0) + stage * SCALE_BYTES; }
  __device__ __forceinline__ u32 factor(u32 group, u32 kind) const {
    return scale(STAGES) + (2 * group + kind) * COLUMNS * 4;
  }
  __device__ __forceinline__ u32 full(u32 stage) const { return factor(2, 0) + stage * 8; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(STAGES) + stage * 8; }
};

// The feeding lane: asks for every chunk of every tile, as stages come free in both blocks.
__device__ __forceinline__ void feed(const Arguments &p, const Memory &memory, int rank) {
  Ring<STAGES> turn = {0, 1};
#pragma unroll 1
  for (int tile = blockIdx.x / CLUSTER; tile < p.pairs * p.tiles; tile += gridDim.x / CLUSTER) {
    const Place at = place(p, tile, rank);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk, turn.next()) {
      const u32 full = memory.full(turn.stage), x = memory.x(turn.stage), half = rank * (COLUMNS / 2);
      barrier_wait(memory.empty(turn.stage), turn.phase);
      barrier_expect(full, STAGE_BYTES);
      bulk_tensor(x, &p.x, chunk * CHUNK, at.token0, full);
      tensor_to_both(x + X_BYTES + half * CHUNK, &p.w, chunk * CHUNK, at.row0 + half, full);
    }
  }
}

// Four groups' scales of a token, from group `first` on; beyond the last group they are its.
__device__ __forceinline__ void token_scales(const Arguments &p, int token, int first, float *scale) {
  const float *from = p.x_scale + (long long)min(token, p.M - 1) * p.groups;
  if (!X_GROUPED) {
    for (int i = 0; i < 4; ++i) scale[i] = 1.f;
  } else if (p.groups % 4 == 0) {
    const float4 four = *(const float4 *)(from + first);
    scale[0] = four.x, scale[1] = four.y, scale[2] = four.z, scale[3] = four.w;
  } else {
    for (int i = 0; i < 4; ++i) scale[i] = from[min(first + i, p.groups - 1)];
  }
}
// The warp that brings scales: the products of a token's and of W's, for each of a chunk's products.
__device__ __forceinline__ void feed_scales(const Arguments &p, const Memory &memory, int rank, int lane) {
  Ring<STAGES> turn = {0, 1};
#pragma unroll 1
  for (int tile = blockIdx.x / CLUSTER; tile < p.pairs * p.tiles; tile += gridDim.x / CLUSTER) {
    const Place at = place(p, tile, rank);
#pragma unroll 1
    for (int four = 0; four < p.chunks * GROUPS; four += 4) {
      float x[ROWS / 32][4];
#pragma unroll
      for (int i = 0; i < ROWS / 32; ++i) token_scales(p, at.token0 + i * 32 + lane, four, x[i]);
#pragma unroll
      for (int first = 0; first < 4; first += GROUPS) {
        if (four + first >= p.chunks * GROUPS) continue;
        float w[PRODUCTS];
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
          w[i] = W_GROUPED ? w_scale(p, at.row0 + i / GROUPS * TOKENS, four + first + i % GROUPS) : 1.f;
        if (lane == 0) barrier_wait(memory.empty(turn.stage), turn.phase);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PRODUCTS * ROWS / 32; ++i) {
          const int product = i / (ROWS / 32), row = i % (ROWS / 32);
          write_float(memory.scale(turn.stage) + (i * 32 + lane) * 4, x[row][first + product % GROUPS] * w[product]);
        }
        barrier_arrive(memory.full(turn.stage));
        turn.next();
      }
    }
  }
}

// Where a warpgroup is in the ring, with the low halves of its operands' matrix descriptors, to which a sixteenth of an
// offset can be added.
struct Walk {
  Ring<STAGES> turn;
  u32 x, w;
  __device__ __forceinline__ Walk(const Memory &memory, int group) : turn{0, 0} {
    x = (memory.x(0) + group * 64 * CHUNK) >> 4 | 1 << 16;
    w = (memory.x(0) + X_BYTES) >> 4 | 1 << 16;
  }
  __device__ __forceinline__ void next() {
    turn.next();
    const int step = turn.stage ? STAGE_BYTES / 16 : -(STAGES - 1) * (STAGE_BYTES / 16);
    x += step, w += step;
  }
};
__device__ __forceinline__ u64 descriptor(u32 low) { return row_descriptor(0) | low; }

// A warpgroup's way through the chunks of a tile. Sums 4j and 4j + 1 are of token g, 4j + 2 and 4j + 3 of token g + 8.
__device__ __forceinline__ void multiply(const Arguments &p, const Memory &memory, Walk &walk, float *total, int row,
                                         int lane) {
  Sum sum[TOKENS / 2];
  barrier_wait(memory.full(walk.turn.stage), walk.turn.phase);
#pragma unroll 1
  for (int chunk = 1; chunk <= p.chunks; ++chunk) {
    const u32 empty = memory.empty(walk.turn.stage), scales = memory.scale(walk.turn.stage) + row * 4;
    bool there = false;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const int part = i / GROUPS, first = i % GROUPS * FOLD;
      const u32 w = walk.w + part * (TOKENS * CHUNK / 16);
      wgmma_fence();
#pragma unroll
      for (int step = first; step < first + FOLD; ++step)
        wgmma_shared(sum, descriptor(walk.x + step * 2), descriptor(w + step * 2), step > first);
      wgmma_commit();
      float scale[2] = {1.f, 1.f};
      for (int r = 0; r < 2 && SCALED; ++r) scale[r] = read_float(scales + (i * ROWS + r * 8) * 4);
      if (i + 1 == PRODUCTS) walk.next();
      wgmma_wait<0>();
      settle<TOKENS / 2>(sum);
      if (i + 1 == PRODUCTS) {  // nothing reads the stage any more
        __syncwarp();
        if (lane < CLUSTER) arrive_at(empty, lane);
        there = barrier_over(memory.full(walk.turn.stage), walk.turn.phase);
      }
#pragma unroll
      for (int j = 0; j < TOKENS / 2; ++j) {
        float &to = total[part * (TOKENS / 2) + j];
        to = fmaf(sum[j], scale[j / 2 % 2], to);
      }
      settle<TOKENS / 2>(total + part * (TOKENS / 2));
    }
    if (!there && chunk < p.chunks) barrier_wait(memory.full(walk.turn.stage), walk.turn.phase);
  }
}

// Rescales a warp's totals by the scales that do not change along K, and stores them, 32 columns at a time, by way of
// shared memory, so that they leave in pieces of 16 bytes.
template <bool BIAS> __device__ __forceinline__ void store(const Arguments &p, const Memory &memory, const float *total,
                                                           const Place &at, int group, int warp, int lane) {
  const int token0 = at.token0 + group * 64 + warp * 16;
  float x[2] = {1.f, 1.f};
  for (int r = 0; r < 2 && !X_GROUPED; ++r) x[r] = p.x_scale[min(token0 + lane / 4 + 8 * r, p.M - 1)];
#pragma unroll 1
  for (int i = warp * 32 + lane; i < COLUMNS && (BIAS || !W_GROUPED); i += 128) {
    const int n = min(at.row0 + i, p.N - 1);
    if (!W_GROUPED) write_float(memory.factor(group, 0) + i * 4, w_scale(p, n, 0));
    if (BIAS) write_float(memory.factor(group, 1) + i * 4, half_float(p.bias[n], Y_FP16));
  }
  if (BIAS || !W_GROUPED) meet(1 + group, 128);
#pragma unroll
  for (int pass = 0; pass < COLUMNS / 32; ++pass) {
    const u32 out = memory.out(group * 4 + warp, pass % 2);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 halves[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = pass * 4 + pair * 2 + i;
        float2 w = make_float2(1.f, 1.f), bias = make_float2(0.f, 0.f);
        if (!W_GROUPED) w = read_two(memory.factor(group, 0) + (8 * j + lane % 4 * 2) * 4);
        if (BIAS) bias = read_two(memory.factor(group, 1) + (8 * j + lane % 4 * 2) * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float low = total[4 * j + 2 * r], high = total[4 * j + 2 * r + 1];
          if (!X_GROUPED) low = __fmul_rn(low, x[r]), high = __fmul_rn(high, x[r]);
          if (!W_GROUPED) low = __fmul_rn(low, w.x), high = __fmul_rn(high, w.y);
          if (BIAS) low = __fadd_rn(low, bias.x), high = __fadd_rn(high, bias.y);
          halves[2 * i + r] = pack<Y_FP16>(low, high);
        }
      }
      // a token's 64 bytes are swizzled by XOR of their 16-byte pieces with token / 2 % 4
      const u32 token = (lane >> 3 & 1) * 8 + (lane & 7), piece = pair * 2 + (lane >> 4);
      store_rows(out + token * 64 + (piece ^ token / 2 % 4) * 16, halves);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane / 4 + 8 * i, m = token0 + token, n = at.row0 + pass * 32 + lane % 4 * 8;
      u32 four[4];
      read_words<4>(four, out + token * 64 + (lane % 4 ^ token / 2 % 4) * 16);
      if (m < p.M && n < p.N) *(uint4 *)(p.y + (long long)m * p.N + n) = make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
  if (BIAS || !W_GROUPED) meet(1 + group, 128);
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    linear_narrow_fp8(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  // From a shuffle the compiler learns that a warp's threads agree on it.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = cluster_rank(), group = warp / 4;
  const Memory memory = {(shared_address(shared) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(memory.full(i), 1 + (SCALED ? 32 : 0));
    for (int i = 0; i < STAGES; ++i) barrier_init(memory.empty(i), CLUSTER * WARPS);
    barrier_init_fence();
  }
  cluster_sync();
  wait_for_previous();
  if (warp >= WARPS) {
    keep_registers<40, true, false>();
    if (warp == WARPS && lane == 0) feed(p, memory, rank);
    if (warp == WARPS + 1 && SCALED) feed_scales(p, memory, rank, lane);
    __syncwarp();
  } else {
    keep_registers<232, true, true>();
    Walk walk(memory, group);
    const int step = gridDim.x / CLUSTER;
#pragma unroll 1
    for (int tile = blockIdx.x / CLUSTER; tile < p.pairs * p.tiles; tile += step) {
      const Place at = place(p, tile, rank);
      float total[COLUMNS / 2] = {};
      multiply(p, memory, walk, total, group * 64 + warp % 4 * 16 + lane / 4, lane);
      if (tile + step >= p.pairs * p.tiles) launch_dependents();
      if (p.bias)
        store<true>(p, memory, total, at, group, warp % 4, lane);
      else
        store<false>(p, memory, total, at, group, warp % 4, lane);
    }
  }
  cluster_sync();  // nobody leaves while the other block may still copy or arrive here
}
