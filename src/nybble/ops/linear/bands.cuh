// The order in which blocks that stay walk over tiles: BAND columns of them together, so that what is being read fits the
// L2 cache. Definition: CLUSTER.
#pragma once

#define BAND 8

// The first row of a block's tile, HEIGHT rows a block, and its first column, WIDTH columns a tile.
template <int HEIGHT, int WIDTH, class Place>
__device__ __forceinline__ Place place_of(int tile, const int &pairs, const int &columns, int rank) {
  const int band = tile / (pairs * BAND), within = tile - band * pairs * BAND;
  const int width = min(BAND, columns - band * BAND);
  return {(within / width * CLUSTER + rank) * HEIGHT, (band * BAND + within % width) * WIDTH};
}
