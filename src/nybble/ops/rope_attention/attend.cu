// Rotation, cache and attention of one new token a sequence, in one kernel for sm_90 and later.
//
// A cluster of CLUSTER blocks serves HEADS query heads that share one key head of one sequence. A group of LANES lanes
// holds a key's columns between them, a lane eight of the first half and the eight that a rotation pairs them with; a
// block's groups take a key each, and the keys go round over the cluster's blocks, so that all of them have work at any
// length. Every group keeps a running maximum and sum; groups meet in their warp, warps in shared memory, blocks through
// each other's shared memory. The new token's key and value are in registers: one group starts with them, the first
// cluster of a key head writes them to the cache, and nobody waits.
//
// Before the kernel waits for its predecessor it asks for the cache's lines to be brought into the L2 cache. The position
// that it reads for that may be any number still: the hint depends on it, and what is loaded again if it was another.
// Keys and values wait in registers and not in shared memory: a block with little of that comes in beside the products
// before and after, one that asks for much only when they have left the processor.
//
// Definitions: HEAD_DIM (64, 128 or 256), HEADS (1 or 2), CLUSTER (1, 2, 4, 8), X_FP16 (fp16, else bf16).
#include "pairs.cuh"
#include "early.cuh"

#define LANES (HEAD_DIM / 16)  // that share a key
#define DIMS 16                // columns of a lane
#define WORDS (DIMS / 2)
#define THREADS 128
#define WARPS (THREADS / 32)
#define KEYS (THREADS / LANES)  // of a block at once
#define STEP (KEYS * CLUSTER)   // from a group's key to its next
#define DEEP 2                  // keys that a group works on
#define AHEAD 8                 // keys that it has brought into the L2 cache
#define MET (DIMS * LANES / 32)  // of its columns a lane has the sums of, when its warp has met
#define REGISTERS 160  // a thread: with those of a product's block, 512 threads of 88, they are all that a processor has
#define ALL 0xFFFFFFFFu
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

struct Arguments {
  const u16 *qkv, *cos, *sin;  // [B, (Hq + 2 Hkv) D], [S, D] twice
  u16 *k_cache, *v_cache, *o;  // [B, Hkv, S, D] twice, [B, Hq, D]
  const int *position;
  int capacity, q_heads, kv_heads, parts;  // parts: clusters a key head
  float scale;  // log2(e) / sqrt(D)
};

__device__ __forceinline__ float power_of_2(float a) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  return y;
}
__device__ __forceinline__ int read_now(const int *from) {
  int found;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
  return found;
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}
__device__ __forceinline__ float read_block(const float *mine, u32 rank) {  // the same place in another block
  float found = *mine;
  if (CLUSTER > 1)
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %1, %2; ld.shared::cluster.f32 %0, [r]; }"
                 : "=f"(found) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(rank) : "memory");
  return found;
}

// A lane's columns of a head: words 0 to 3 of the first half, 4 to 7 of the second.
struct Columns {
  u32 w[WORDS];

  __device__ __forceinline__ void load(const u16 *from, bool inside = true) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = inside ? *(const uint4 *)(from + half * (HEAD_DIM / 2)) : uint4{0, 0, 0, 0};
      w[4 * half] = four.x, w[4 * half + 1] = four.y, w[4 * half + 2] = four.z, w[4 * half + 3] = four.w;
    }
  }
  __device__ __forceinline__ void store(u16 *to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(uint4 *)(to + half * (HEAD_DIM / 2)) = {w[4 * half], w[4 * half + 1], w[4 * half + 2], w[4 * half + 3]};
  }
  // These times cos plus (-second half, first half) times sin, every product and sum rounded.
  __device__ __forceinline__ void rotate(const Columns &cos, const Columns &sin) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 first = turned(w[i], w[i + 4], cos.w[i], sin.w[i], -1.f);
      w[i + 4] = turned(w[i + 4], w[i], cos.w[i + 4], sin.w[i + 4], 1.f), w[i] = first;
    }
  }
  static __device__ __forceinline__ u32 turned(u32 own, u32 other, u32 cos, u32 sin, float sign) {
    const u32 a = rounded(__fmul_rn(low_of(own), low_of(cos)), __fmul_rn(high_of(own), high_of(cos)));
    const u32 b = rounded(__fmul_rn(sign * low_of(other), low_of(sin)), __fmul_rn(sign * high_of(other), high_of(sin)));
    return rounded(__fadd_rn(low_of(a), low_of(b)), __fadd_rn(high_of(a), high_of(b)));
  }
};

// What a group of lanes, a warp or a block knows of one query head: the largest score so far and sums relative to it.
struct Sums {
  float most[HEADS], total[HEADS], o[HEADS][DIMS];

  // The factor for what was summed relative to `before` when the maximum is `now`; 0 where nothing was summed.
  static __device__ __forceinline__ float shrink(float before, float now) {
    return power_of_2(before - (now == MINUS_INFINITY ? 0.f : now));
  }
};

__device__ __forceinline__ float dot(const Columns &q, const Columns &k) {
  float even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    even = fmaf(low_of(q.w[i]), low_of(k.w[i]), even);
    odd = fmaf(high_of(q.w[i]), high_of(k.w[i]), odd);
  }
  float sum = even + odd;
#pragma unroll
  for (int apart = 1; apart < LANES; apart *= 2) sum += __shfl_xor_sync(ALL, sum, apart);
  return sum;
}

// A key head's cache of one sequence, as a lane sees it.
struct Cache {
  const u16 *keys, *values;  // its columns of entry 0
  int lane;                  // in its group

  // A hint that COUNT keys of the group, from `first` on, will be read with their values; a lane a line of 128 bytes.
  template <int COUNT> __device__ __forceinline__ void prefetch(int first, int length) const {
    const u16 *from = (lane & 1 ? values : keys) - lane * 8 + lane / 2 * 64;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (first + i * STEP < length && lane < HEAD_DIM / 32) prefetch_l2(from + (long long)(first + i * STEP) * HEAD_DIM);
  }
};

// The keys and values that a group works on; zeros past the end.
struct Held {
  Columns k[DEEP], v[DEEP];

  __device__ __forceinline__ void load(const Cache &cache, int first, int length) {
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const long long at = (long long)(first + i * STEP) * HEAD_DIM;
      k[i].load(cache.keys + at, first + i * STEP < length), v[i].load(cache.values + at, first + i * STEP < length);
    }
  }
  __device__ __forceinline__ void add_to(Sums &sums, const Columns *q, float scale, int first, int length) const {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float score[DEEP], most = sums.most[h];
#pragma unroll
      for (int i = 0; i < DEEP; ++i) {
        score[i] = dot(q[h], k[i]) * scale;
        if (first + i * STEP >= length) score[i] = MINUS_INFINITY;
        most = fmaxf(most, score[i]);
      }
      const float kept = Sums::shrink(sums.most[h], most);
      sums.most[h] = most, sums.total[h] *= kept;
#pragma unroll
      for (int i = 0; i < DIMS; ++i) sums.o[h][i] *= kept;
#pragma unroll
      for (int i = 0; i < DEEP; ++i) {
        const float weight = Sums::shrink(score[i], most);
        sums.total[h] += weight;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
          sums.o[h][2 * j] = fmaf(weight, low_of(v[i].w[j]), sums.o[h][2 * j]);
          sums.o[h][2 * j + 1] = fmaf(weight, high_of(v[i].w[j]), sums.o[h][2 * j + 1]);
        }
      }
    }
  }
};

// A warp's groups together: COUNT sums a lane become sums over both groups of a pair, each lane with one half of them.
template <int COUNT, int APART> __device__ __forceinline__ void halve(float *o, int lane, int &start) {
  if constexpr (APART < 32) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const float other = __shfl_xor_sync(ALL, lane & APART ? o[i] : o[i + COUNT / 2], APART);
      o[i] = (lane & APART ? o[i + COUNT / 2] : o[i]) + other;
    }
    start += lane & APART ? COUNT / 2 : 0;
    halve<COUNT / 2, 2 * APART>(o, lane, start);
  }
}

// All lanes know the maximum and the total of their warp afterwards, and MET columns' sums from `start` on.
__device__ __forceinline__ int meet_in_warp(Sums &sums, int lane) {
  int start = 0;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    float most = sums.most[h];
#pragma unroll
    for (int apart = LANES; apart < 32; apart *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, apart));
    const float kept = Sums::shrink(sums.most[h], most);
    sums.most[h] = most, sums.total[h] *= kept;
#pragma unroll
    for (int apart = LANES; apart < 32; apart *= 2) sums.total[h] += __shfl_xor_sync(ALL, sums.total[h], apart);
#pragma unroll
    for (int i = 0; i < DIMS; ++i) sums.o[h][i] *= kept;
    start = 0;
    halve<DIMS, LANES>(sums.o[h], lane, start);
  }
  return start;
}

struct Met {  // sums of the warps, then of the block
  float o[WARPS][HEADS * HEAD_DIM], most[WARPS][HEADS], total[WARPS][HEADS];
  float whole_o[HEADS * HEAD_DIM], whole_most[HEADS], whole_total[HEADS];
};

// Of `count` sums the maximum, and the total and column `at` relative to it.
template <int COUNT, typename Most, typename Total, typename Column>
__device__ __forceinline__ void join(Most most, Total total, Column column, float &whole_most, float &whole_total, float &o) {
  float each[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) each[i] = most(i);
  whole_most = MINUS_INFINITY, whole_total = 0, o = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) whole_most = fmaxf(whole_most, each[i]);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float kept = Sums::shrink(each[i], whole_most);
    whole_total = fmaf(total(i), kept, whole_total), o = fmaf(column(i), kept, o);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __maxnreg__(REGISTERS) rope_attention(const Arguments p) {
  __shared__ Met met;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank(), in_group = lane % LANES;
  const int cluster = blockIdx.x / CLUSTER, kv_head = cluster / p.parts, part = cluster % p.parts;
  const int group = p.q_heads / p.kv_heads, head0 = kv_head * group + part * HEADS, column = in_group * 8;
  const long long start = ((long long)blockIdx.y * p.kv_heads + kv_head) * p.capacity * HEAD_DIM + column;
  const Cache cache = {p.k_cache + start, p.v_cache + start, in_group};
  const int in_block = threadIdx.x / LANES, first = rank * KEYS + in_block;
  launch_dependents();
  const int expected = min((u32)read_now(p.position), (u32)p.capacity - 1);
  cache.prefetch<AHEAD>(first, expected);
  wait_for_previous();

  const u16 *qkv = p.qkv + (long long)blockIdx.y * (p.q_heads + 2 * p.kv_heads) * HEAD_DIM + column;
  const u16 *new_key = qkv + (long long)(p.q_heads + kv_head) * HEAD_DIM;
  Columns q[HEADS], k, v, cos, sin;
  Held held;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) q[h].load(qkv + (long long)min(head0 + h, p.q_heads - 1) * HEAD_DIM);
  k.load(new_key), v.load(new_key + (long long)p.kv_heads * HEAD_DIM);
  const int length = read_now(p.position);
  auto load = [&](int position) {
    held.load(cache, first, position);
    cos.load(p.cos + (long long)position * HEAD_DIM + column), sin.load(p.sin + (long long)position * HEAD_DIM + column);
  };
  load(expected);
  if (length != expected) load(length);
  k.rotate(cos, sin);
  const bool owner = first == 0;
  if (owner && part == 0) {
    k.store(p.k_cache + start + (long long)length * HEAD_DIM);
    v.store(p.v_cache + start + (long long)length * HEAD_DIM);
  }

  Sums sums;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    q[h].rotate(cos, sin);
    const float score = dot(q[h], k) * p.scale;
    sums.most[h] = owner ? score : MINUS_INFINITY, sums.total[h] = owner;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      sums.o[h][2 * i] = owner ? low_of(v.w[i]) : 0.f;
      sums.o[h][2 * i + 1] = owner ? high_of(v.w[i]) : 0.f;
    }
  }
#pragma unroll 1
  for (int key = first; key - in_block < length; key += DEEP * STEP) {
    Held next;
    next.load(cache, key + DEEP * STEP, length);
    cache.prefetch<DEEP>(key + AHEAD * STEP, length);
    held.add_to(sums, q, p.scale, key, length);
    held = next;
  }

  const int mine = meet_in_warp(sums, lane);
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    float *to = met.o[warp] + h * HEAD_DIM + mine / 8 * (HEAD_DIM / 2) + column + mine % 8;
#pragma unroll
    for (int i = 0; i < MET; ++i) to[i] = sums.o[h][i];
    if (lane == 0) met.most[warp][h] = sums.most[h], met.total[warp][h] = sums.total[h];
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM;
    float most, total, o;
    join<WARPS>([&](int w) { return met.most[w][h]; }, [&](int w) { return met.total[w][h]; },
                [&](int w) { return met.o[w][i]; }, most, total, o);
    met.whole_o[i] = o;
    if (i % HEAD_DIM == 0) met.whole_most[h] = most, met.whole_total[h] = total;
  }
  cluster_sync();
  constexpr int share = HEADS * HEAD_DIM / CLUSTER;
  for (int i = threadIdx.x; i < share; i += THREADS) {
    const int at = rank * share + i, h = at / HEAD_DIM;
    float most, total, o;
    join<CLUSTER>([&](int b) { return read_block(met.whole_most + h, b); }, [&](int b) { return read_block(met.whole_total + h, b); },
                  [&](int b) { return read_block(met.whole_o + at, b); }, most, total, o);
    const u16 result = (u16)rounded(o / total, 0.f);
    if (part * HEADS + h < group) p.o[((long long)blockIdx.y * p.q_heads + head0 + h) * HEAD_DIM + at % HEAD_DIM] = result;
  }
  cluster_sync();  // nobody leaves while another block may still read here
}
