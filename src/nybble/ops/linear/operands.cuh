// From the 64 rows that the copy engine has brought of a chunk to the register operands of wgmma, each the element times its
// scale in x's dtype unless scales are left to the end.
//
// Definitions beyond decode.cuh's: INT_TAKES_SCALE, SCALE_UP (exponent by which other scales are raised to stay within
// fp16).
#pragma once

#define SCALE_TILE (8 * ROW_SCALE_BYTES)
#define ZERO_TILE (8 * ROW_ZERO_BYTES)
#define GROUP_BYTES (4 * (TILE_BYTES + SCALE_TILE + ZERO_TILE))  // what 64 rows have of a chunk: codes, scales, zeros

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

// The A operands of a half's four steps: elements, times their scales unless those are left to the end.
template <int HALF> __device__ __forceinline__ void operands(u32 (*a)[4], const Tile &tile) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = HALF * 4 + i, group = j * GROUPS / STEPS;
    u32 terms[2], scales[2] = {};
    tile.terms(group, terms);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = r * GROUPS + group;
      if (INT_TAKES_SCALE) {
        scales[r] = __byte_perm(tile.scale[at / 2], 0, at & 1 ? 0x3232 : 0x1010);
        terms[r] = mul2(scales[r], SIGN | POWER(INT_SCALE_UP + BITS - X_BIAS - X_MANTISSA));
      } else if (!FOLD && !ROW_SCALE) {
        scales[r] = SPLAT(float_x(scale_value(tile.scale, at) * __uint_as_float((127 + SCALE_UP) << 23)));
      }
    }
    decode_step(tile.codes, j, terms, scales, nullptr, a[i]);
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if (!FOLD && !ROW_SCALE && !INT_TAKES_SCALE) a[i][p] = mul2(a[i][p], scales[p & 1]);
  }
}
