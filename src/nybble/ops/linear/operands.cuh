// From the 64 rows that the copy engine has brought of a chunk to the register operands of wgmma, each the element times its
// scale in x's dtype, rounded once, unless scales are left to the end.
//
// Where that would round the same few products over and over (8-bit floats under a float32 scale), a scale is taken apart
// into a power of two, which elements take in exactly, and a number in [1, 2), which only sums take (SUM_SCALE).
//
// Definitions beyond decode.cuh's: INT_TAKES_SCALE, SUM_SCALE (with one group in a chunk), SCALE_UP (exponent by which other
// scales are raised to stay within x's dtype).
#pragma once

#define SCALE_TILE (8 * ROW_SCALE_BYTES)
#define ZERO_TILE (8 * ROW_ZERO_BYTES)
#define GROUP_BYTES (4 * (TILE_BYTES + SCALE_TILE + ZERO_TILE))  // what 64 rows have of a chunk: codes, scales, zeros

// A table's values in shared memory, [16 codes][32 lanes], at a multiple of its size: a bank for every lane.
#define LOOKUP_BYTES (CODE == TABLE ? 16 * 128 : 0)

// The first address from `start` on that suits the swizzles, with room for a table before it.
__device__ __forceinline__ u32 behind_lookup(u32 start) {
  return LOOKUP_BYTES ? ((start + LOOKUP_BYTES - 1) & ~(LOOKUP_BYTES - 1u)) + LOOKUP_BYTES : (start + 1023) & ~1023u;
}
#if CODE == TABLE
__device__ __forceinline__ void fill_lookup(u32 to, const float *values, int threads) {
  for (int i = threadIdx.x; i < LOOKUP_BYTES / 4; i += threads)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + i * 4), "f"(values[i / 32]) : "memory");
}
// The value of the code AT bits up in `word`.
template <int AT> __device__ __forceinline__ float look_up(u32 word, u32 bank) {
  float value;
  asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(and_or(shift_left<7 - AT>(word), LOOKUP_BYTES - 128, bank)));
  return value;
}
template <int PAIR> __device__ __forceinline__ u32 scaled_pair(u32 word, u32 bank, float scale) {
  return pack<X_FP16>(look_up<4 * PAIR>(word, bank) * scale, look_up<4 * PAIR + 16>(word, bank) * scale);
}
#endif

#define TWO_TO(exponent) __uint_as_float((127 + (exponent)) << 23)

// A lane's bank of a table, and what it multiplies scales by in either half of a step's 16 columns. Under one scale the
// same few products recur, and so would their roundings; so each of eight columns has its factor, spread over one unit in
// the last place, and errors no longer add up where x is alike in neighbouring columns.
struct Lookup {
  u32 bank;
  float up[2];
  __device__ __forceinline__ Lookup(u32 table, int lane) : bank(table + lane * 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      up[half] = TWO_TO(SCALE_UP) * (1 + ((lane & 3) * 2 + half - 3.5f) * TWO_TO(-X_MANTISSA - 4));
  }
};

// Warp `warp` of a warpgroup reads its 16 rows of the GROUP_BYTES at `from`; `row` is 8 * warp + lane / 4, TOGETHER as in
// weights.cuh.
template <bool TOGETHER> __device__ __forceinline__ void read_tile(Tile &tile, u32 from, u32 warp, u32 row, int lane) {
  const u32 after = from + 4 * TILE_BYTES;
  tile.read_codes(from + warp * TILE_BYTES, lane);
  if (SCALE_TILE)
    read_row<Tile::scale_bytes<TOGETHER>()>(tile.scale, after + row * SCALE_BYTES + Tile::scale_start<TOGETHER>(lane));
  if (ZERO_TILE) read_row<ZERO_BYTES>(tile.zero, after + 4 * SCALE_TILE + row * ZERO_BYTES);
  tile.prepare<TOGETHER>(lane);
}

#define ELEMENT_SCALE (!FOLD && !ROW_SCALE && !INT_TAKES_SCALE && !SUM_SCALE)

// The A operands of a half's four steps.
template <int HALF>
__device__ __forceinline__ void operands(u32 (*a)[4], const Tile &tile, [[maybe_unused]] const Lookup &lookup) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = HALF * 4 + i, group = j * GROUPS / STEPS;
#if CODE == TABLE
    const u32 word = tile.codes[j], bank = lookup.bank;
    const float low = scale_value(tile.scale, group), high = scale_value(tile.scale, GROUPS + group);
    a[i][0] = scaled_pair<0>(word, bank, low * lookup.up[0]), a[i][1] = scaled_pair<1>(word, bank, high * lookup.up[0]);
    a[i][2] = scaled_pair<2>(word, bank, low * lookup.up[1]), a[i][3] = scaled_pair<3>(word, bank, high * lookup.up[1]);
#else
    u32 terms[2], scales[2] = {};
    tile.terms(group, terms);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = r * GROUPS + group;
      if (INT_TAKES_SCALE) {
        scales[r] = __byte_perm(tile.scale[at / 2], 0, at & 1 ? 0x3232 : 0x1010);
        terms[r] = mul2(scales[r], SIGN | POWER(INT_SCALE_UP + BITS - X_BIAS - X_MANTISSA));
      } else if (ELEMENT_SCALE) {
        scales[r] = SPLAT(float_x(scale_value(tile.scale, at) * TWO_TO(SCALE_UP)));
      }
#if SUM_SCALE
      const float power = __uint_as_float(__float_as_uint(scale_value(tile.scale, at)) & 0xFF800000u);
      terms[r] = SPLAT(float_x(power * TWO_TO(X_BIAS - ELEMENT_BIAS + SCALE_UP)));
#endif
    }
    decode_step(tile.codes, j, terms, scales, nullptr, a[i]);
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if (ELEMENT_SCALE) a[i][p] = mul2(a[i][p], scales[p & 1]);
#endif
  }
}

#if SUM_SCALE
// What sums of a lane's two rows are in units of: the part of the scales that elements leave, or one.
struct Units {
  float row[2] = {1.f, 1.f};
  Units() = default;
  __device__ __forceinline__ explicit Units(const Tile &tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row[r] = __uint_as_float((__float_as_uint(scale_value(tile.scale, r)) & 0x007FFFFFu) | 0x3F800000u);
  }
};
// Brings sums from the units `from` into the units `to`.
template <int Count> __device__ __forceinline__ void rescale(float *sum, const Units &from, const Units &to) {
  const float ratio[2] = {__fdividef(from.row[0], to.row[0]), __fdividef(from.row[1], to.row[1])};
  settle<Count>(sum);
#pragma unroll
  for (int i = 0; i < Count; ++i) sum[i] *= ratio[i >> 1 & 1];
  settle<Count>(sum);
}
#endif
