// A warp's way through the weight: tiles of 16 rows x 128 columns, copied to shared memory and read back lane by lane.
//
// In global memory four tiles lie together, what 64 rows have in a chunk of 128 columns; a lane's words of a tile come
// in pieces of 16 bytes that are 32 lanes apart. Scales and zero points are [64 rows][groups][4 tiles][8][2][GROUPS].
#pragma once

#define COLUMNS 128
#define STEPS 8
#define TILE_BYTES (16 * COLUMNS * BITS / 8)
#define CODE_WORDS (2 * BITS)
#define SCALE_WORDS (FOLD ? PREPARED_WORDS : (SCALE_BYTES + 3) / 4)
#define ZERO_BYTES (2 * GROUPS)
#define ZERO_WORDS ((ZERO_BYTES + 3) / 4)
#define ROW_SCALE_BYTES (ROW_SCALE ? 0 : SCALE_BYTES)
#define OWN_SCALE_BYTES (EXCHANGES ? SCALE_BYTES / 4 : ROW_SCALE_BYTES)  // what a lane reads: all, or what it prepares
#define ROW_ZERO_BYTES (ZERO_POINT ? ZERO_BYTES : 0)

struct Tile {
  u32 codes[CODE_WORDS], scale[SCALE_WORDS], zero[ZERO_WORDS];

  __device__ __forceinline__ void read_codes(u32 slot, int lane) {
#pragma unroll
    for (int i = 0; i < CODE_WORDS / 4; ++i) read_words<4>(codes + 4 * i, slot + i * 512 + lane * 16);
    if (BITS == 3) read_words<2>(codes + 4, slot + 512 + lane * 8);
  }
  // What a lane reads of its rows' scales: all, or the part that it prepares TOGETHER with others; where that begins.
  template <bool TOGETHER> static __device__ constexpr int scale_bytes() {
    return TOGETHER ? OWN_SCALE_BYTES : ROW_SCALE_BYTES;
  }
  template <bool TOGETHER> static __device__ __forceinline__ int scale_start(int lane) {
    return TOGETHER && EXCHANGES ? (lane & 3) * OWN_SCALE_BYTES : 0;
  }
  // From the scales as they were read to what is needed of them. TOGETHER exchanges results between lanes, which costs
  // less but puts branches where wgmma may not have any.
  template <bool TOGETHER> __device__ __forceinline__ void prepare(int lane) {
#if FOLD
    u32 read[GROUPS / 2], mine[2];
#pragma unroll
    for (int i = 0; i < GROUPS / 2; ++i) read[i] = scale[i];
    if (TOGETHER && EXCHANGES) prepare_scales(read[0], mine);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (!(TOGETHER && EXCHANGES) && i % 2 == 0) prepare_scales(read[i / 2], mine);
      scale[i] = TOGETHER && EXCHANGES ? __shfl_sync(0xFFFFFFFFu, mine[i % 2], i / 2, 4) : mine[i % 2];
    }
#endif
  }
  // What decode_step wants for both rows in a group.
  __device__ __forceinline__ void terms(int group, u32 *out) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#if CODE == INT
      const int byte = r * GROUPS + group;
      out[r] = zero_term(ZERO_POINT ? (int)(signed char)(zero[byte >> 2] >> (8 * (byte & 3))) : 0);
#elif FOLD
      out[r] = folded_scale(scale, r, group);
#elif CODE == FLOAT4 || CODE == FLOAT8
      out[r] = POWER(X_BIAS - ELEMENT_BIAS);
#else
      out[r] = 0;
#endif
    }
  }
};

// A lane's copies of its own pieces, so that a wait of its own is all the synchronisation they need. cp.async moves 4
// bytes at least: a zero point of two bytes is copied with the word it lies in.
#define PIECE(bytes) ((bytes) < 4 ? 4 : (bytes) < 16 ? (bytes) : 16)
#define LANES_OF(bytes) ((bytes) == 0 ? 0 : 32 * ((bytes) < 4 ? 4 : (bytes)))
#define SCALE_AT TILE_BYTES
#define ZERO_AT (SCALE_AT + LANES_OF(OWN_SCALE_BYTES))
#define SLOT (ZERO_AT + LANES_OF(ROW_ZERO_BYTES))

template <int BYTES> __device__ __forceinline__ void copy_own(u32 slot, const char *from, int lane) {
  constexpr int piece = PIECE(BYTES);
#pragma unroll
  for (int i = 0; i < (BYTES + piece - 1) / piece; ++i)
    async_copy<piece>(slot + i * 32 * piece + lane * piece, from + i * piece);
}
template <int BYTES> __device__ __forceinline__ void read_copied(u32 *to, u32 slot, int lane) {
  constexpr int piece = PIECE(BYTES);
#pragma unroll
  for (int i = 0; i < (BYTES + piece - 1) / piece; ++i)
    read_words<piece / 4>(to + i * piece / 4, slot + i * 32 * piece + lane * piece);
  if (BYTES == 2) to[0] >>= (lane >> 2 & 1) * 16;
}
__device__ __forceinline__ void read_copied_tile(Tile &tile, u32 slot, int lane) {
  tile.read_codes(slot, lane);
  read_copied<OWN_SCALE_BYTES>(tile.scale, slot + SCALE_AT, lane);
  read_copied<ROW_ZERO_BYTES>(tile.zero, slot + ZERO_AT, lane);
  tile.prepare<true>(lane);
}

// One row of tiles in global memory, as one lane sees it.
struct TileRow {
  const char *codes, *scale, *zero;

  __device__ __forceinline__ void enter(const char *all_codes, const char *all_scales, const char *all_zeros, int tile,
                                        int chunks, int shift, int lane) {
    const int block = tile >> 2, groups = ((chunks - 1) >> shift) + 1;
    codes = all_codes + ((long long)block * chunks * 4 + (tile & 3)) * TILE_BYTES + lane * 16;
    const long long row = ((long long)block * groups * 4 + (tile & 3)) * 8 + (lane >> 2);
    scale = all_scales + (row * SCALE_BYTES & ~3ll) + Tile::scale_start<true>(lane);
    if (ZERO_POINT) zero = all_zeros + (row * ZERO_BYTES & ~3ll);
  }
  __device__ __forceinline__ void copy(u32 slot, int lane, int chunk, int shift) const {
    const char *from = codes + (u32)(chunk * 4 * TILE_BYTES);
#pragma unroll
    for (int i = 0; i < CODE_WORDS / 4; ++i) async_copy<16>(slot + i * 512 + lane * 16, from + i * 512);
    if (BITS == 3) async_copy<8>(slot + 512 + lane * 8, from + 512 - lane * 8);
    const u32 group = (u32)(chunk >> shift) * 32;
    if (OWN_SCALE_BYTES) copy_own<OWN_SCALE_BYTES>(slot + SCALE_AT, scale + group * SCALE_BYTES, lane);
    if (ROW_ZERO_BYTES) copy_own<ROW_ZERO_BYTES>(slot + ZERO_AT, zero + group * ZERO_BYTES, lane);
  }
};
